"""``python -m benchmarks.coverage``: rows of model types, one JSON line each, and a table of them.

    python -m benchmarks.coverage --stage capture                       every type, captured
    python -m benchmarks.coverage --stage pipeline --sample 40 --seed 0 a sample, up to training with a pipeline
    python -m benchmarks.coverage --types bert,clip --stage verify
    python -m benchmarks.coverage --table                               the table of the rows so far

Stages are build, eager, capture, plan, verify (dp=2,tp=2) and pipeline (pp=2,dp=2). Rows are appended to ``--rows``; a
type that has a row of this stage or a later one is not run again, unless ``--again`` or (if it failed) ``--failed``.
"""

from __future__ import annotations

import argparse
import json
import random
import warnings
from pathlib import Path

from benchmarks.coverage.rows import Row, read_rows, table

STAGES = ("build", "eager", "capture", "plan", "verify", "pipeline")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("--stage", default="verify", choices=STAGES)
    parser.add_argument("--types", default="", help="model types, separated by commas; default: all")
    parser.add_argument("--sample", type=int, help="this many types, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, default=Path("coverage.jsonl"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--failed", action="store_true")
    parser.add_argument("--seconds", type=float, default=600, help="time limit of a type")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(read_rows(options.rows)))
    else:
        _run(options)


def _run(options: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    from benchmarks.coverage.processes import import_once, run_apart
    from benchmarks.coverage.stages import run_type

    import_once()
    classes = _classes(options.rows.with_suffix(".types.json"))
    names = options.types.split(",") if options.types else sorted(classes)
    unknown = [name for name in names if name not in classes]
    if unknown:
        raise SystemExit(f"no class that trains for model types {', '.join(unknown)}")
    if options.sample:
        names = random.Random(options.seed).sample(names, min(options.sample, len(names)))
    rows = read_rows(options.rows)
    for name in names:
        if name in rows and not options.again and _is_final(rows[name], options):
            continue
        row: Row = {"type": name, "class": classes[name]}
        row |= run_apart(run_type, name, classes[name], options.stage, seconds=options.seconds)
        with options.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(name, row.get("passed"), row.get("reason", ""), row.get("seconds"), flush=True)


def _is_final(row: Row, options: argparse.Namespace) -> bool:
    """Whether running the type again would tell nothing new."""
    if "failed" in row:
        return not options.failed
    return STAGES.index(row["passed"]) >= STAGES.index(options.stage)


def _classes(cache: Path) -> dict[str, str]:
    """Model type → class. Finding them imports every model of transformers: they are written down beside the rows."""
    from benchmarks.coverage.model_types import model_types

    if not cache.exists():
        cache.write_text(json.dumps(model_types()))
    classes: dict[str, str] = json.loads(cache.read_text())
    return classes


if __name__ == "__main__":
    main()
