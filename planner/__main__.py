"""``python -m planner`` is the ``planner`` command."""

from planner.cli import command

if __name__ == "__main__":
    raise SystemExit(command())
