"""``python -m benchmarks.coverage``: what holds of every model type of transformers, measured type by type.

    python -m benchmarks.coverage                                       every type, verified on dp=2,tp=2
    python -m benchmarks.coverage --stages verify,pipeline --sample 40  a sample, with a pipeline too
    python -m benchmarks.coverage --types bert,clip --stages capture
    python -m benchmarks.coverage --failed                              what failed, once more
    python -m benchmarks.coverage --stale --stages verify               what was measured at another commit
    python -m benchmarks.coverage --page                                results/coverage.md from the rows

Stages are build, eager, capture, plan, verify (dp=2,tp=2) and pipeline (pp=2,dp=2). Rows are kept in ``--rows``, one
line a type, each outcome with its commit. A stage that has an outcome is not run again; a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import warnings
from pathlib import Path

from benchmarks.coverage.page import page
from benchmarks.coverage.rows import STAGES, Outcome, Row, outcomes_from_data, read_rows, write_rows

RESULTS = Path(__file__).parents[1] / "results"
ROWS, PAGE = RESULTS / "coverage.jsonl", RESULTS / "coverage.md"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coverage", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", default="verify", help=f"of {', '.join(STAGES)}, separated by commas")
    parser.add_argument("--types", default="", help="model types, separated by commas; default: all")
    parser.add_argument("--sample", type=int, help="this many types, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--again", action="store_true", help="run what has an outcome too")
    parser.add_argument("--failed", action="store_true", help="only types of which something failed")
    parser.add_argument("--stale", action="store_true", help="run what was measured at another commit too")
    parser.add_argument("--commit", help="name of the code that is run; default: what git says")
    parser.add_argument("--seconds", type=float, default=300, help="limit of a type's processor time")
    parser.add_argument("--page", action="store_true", help="only write results/coverage.md")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page(read_rows(options.rows)))
    else:
        _run(options)


def _run(options: argparse.Namespace) -> None:
    from benchmarks.coverage.processes import run_apart, warm_up
    from benchmarks.coverage.stages import run_stages

    warnings.filterwarnings("ignore")
    commit = options.commit or _commit()
    rows = read_rows(options.rows) or _all_types(options.rows)
    names = _selected(rows, options)
    warm_up()
    for name in names:
        row = rows[name]
        stages = [stage for stage in _requested(options) if _is_due(row, stage, commit, options)]
        if not stages:
            continue
        inner = [stage for stage in stages if stage not in ("build", "eager")]
        try:
            data = run_apart(run_stages, name, row.class_name, inner, commit=commit, seconds=options.seconds)
            outcomes = outcomes_from_data(data)
        except ChildProcessError as error:
            outcomes = {stages[0]: Outcome(commit, str(error))}
        rows[name] = row.updated(outcomes)
        write_rows(options.rows, rows)
        for stage, outcome in outcomes.items():
            print(name, stage, outcome.reason or "passed", outcome.seconds, flush=True)


def _requested(options: argparse.Namespace) -> list[str]:
    stages = options.stages.split(",")
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown:
        raise SystemExit(f"no stage is named {', '.join(unknown)}: there are {', '.join(STAGES)}")
    return [stage for stage in STAGES if stage in stages]


def _selected(rows: dict[str, Row], options: argparse.Namespace) -> list[str]:
    names = options.types.split(",") if options.types else sorted(rows)
    unknown = [name for name in names if name not in rows]
    if unknown:
        raise SystemExit(f"no class that trains for model types {', '.join(unknown)}")
    if options.failed:
        names = [name for name in names if any(rows[name].failed(stage) for stage in STAGES)]
    if options.sample:
        names = random.Random(options.seed).sample(names, min(options.sample, len(names)))
    return names


def _is_due(row: Row, stage: str, commit: str, options: argparse.Namespace) -> bool:
    """Whether running the stage may tell something new."""
    outcome = row.outcomes.get(stage)
    if options.again or (options.stale and outcome is not None and outcome.commit != commit):
        return True
    if options.failed:
        return not row.passed(stage)
    return outcome is None and not any(row.failed(earlier) for earlier in ("build", "eager", "capture"))


def _commit() -> str:
    """The commit that is checked out, and whether the code differs from it."""

    def git(*args: str) -> str:
        return subprocess.run(("git", *args), capture_output=True, text=True, check=True, cwd=RESULTS).stdout.strip()

    layers = [f":/{layer}" for layer in ("planner", "runtime", "passes", "cost_models")]
    changed = git("status", "--porcelain", "--", *layers)
    return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


def _all_types(path: Path) -> dict[str, Row]:
    """A row without outcomes for every type. Finding the classes imports every model of transformers: once."""
    from benchmarks.coverage.model_types import model_types

    rows = {name: Row(name, class_name) for name, class_name in model_types().items()}
    write_rows(path, rows)
    return rows


if __name__ == "__main__":
    main()
