"""``python -m planner`` is the ``planner`` command."""

from __future__ import annotations

import sys


def command() -> int:
    """The command line as a process of its own; returns the exit code, an interrupt's also while modules are loaded."""
    try:
        from planner.cli import command as run

        return run()
    except KeyboardInterrupt:
        print("planner: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(command())
