"""Whether the prices that ``planner explain`` shows sum to the objective: for every model of the library.

``python -m benchmarks.objective_sums [NAME …]`` plans each on the fewest H100s of a few clusters that hold it, and
writes the relative error of each to ``benchmarks/results/objective_sums.md``. Models that are there already are left
out unless they are named, so that it may be stopped at any time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import planner
from passes.plan import Plan
from passes.plan.step_summary import seq_len_of
from planner.library.batch_fields import batch_fields
from planner.library.configs import config_names, load_config

RESULTS = Path(__file__).parent / "results" / "objective_sums.md"
#: Nodes of eight H100s: the first that hold a model are taken.
NODES = (2, 16, 128)
#: Tokens of a sample: the first that a model has positions for, and room for its images.
LENGTHS = (512, 2048, 8192, 64, 32)
#: The largest relative error that rounding explains.
ROUNDING = 1e-9
_HEAD = """# Prices that `planner explain` shows, summed, against the plan's objective

Each model of the library, 64 samples in a step; written by `python -m benchmarks.objective_sums`.

| model | cluster | tokens of a sample | relative error | CPU s |
|---|---|---|---|---|
"""


def length_for(name: str, *, lengths: Sequence[int] = LENGTHS) -> int:
    """The first of ``lengths`` that a batch of the model can have.

    Raises:
        ValueError: why it can have none.
    """
    config = load_config(name)
    for length in lengths:
        try:
            batch_fields(config, batch_size=1, seq_len=length)
        except ValueError as error:
            reason = error
            continue
        return length
    raise reason


def first_plan(name: str) -> Plan:
    """The model's plan on the first of ``NODES`` that hold it.

    Raises:
        ValueError: why there is none.
    """
    seq_len = length_for(name)
    for nodes in NODES:
        try:
            return planner.plan(name, f"dgx-h100:{nodes}", global_batch=64, seq_len=seq_len, time_limit=20.0)
        except ValueError as error:
            if "fits in memory" not in str(error):
                raise
            reason = error
    raise reason


def row_of(name: str) -> str:
    """The model's row: the error of its sum, or why it has no plan."""
    start = time.process_time()
    try:
        plan = first_plan(name)
        prices = plan.explain("*").prices
        error = abs(sum(prices.values()) / plan.certificate.objective - 1.0)
        cells = [f"{plan.cluster['name']}", f"{seq_len_of(plan) or '-'}", f"{error:.1e}"]
    except ValueError as reason:
        cells = ["-", "-", "no plan: " + " ".join(str(reason).split())[:120].replace("|", "/")]
    return f"| {name} | {' | '.join(cells)} | {time.process_time() - start:.1f} |"


def recorded() -> dict[str, str]:
    """The rows that were written, by model."""
    if not RESULTS.exists():
        return {}
    rows = [line for line in RESULTS.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {row.split("|")[1].strip(): row for row in rows if not row.startswith("| model")}


def is_wrong(row: str) -> bool:
    """Whether there is no sum, or one with an error that rounding does not explain."""
    error = row.split("|")[4].strip()
    return error.startswith("no plan") or not float(error) <= ROUNDING


def main() -> int:
    """Print and record a line for each model; returns 1 if a sum is wrong."""
    rows = recorded()
    for name in sys.argv[1:] or [name for name in config_names() if name not in rows]:
        rows[name] = row_of(name)
        print(rows[name], flush=True)
        RESULTS.write_text(_HEAD + "\n".join(rows[each] for each in sorted(rows)) + "\n", encoding="utf-8")
    wrong = [name for name, row in rows.items() if is_wrong(row)]
    print(f"{len(rows)} of {len(config_names())} models, without a right sum: {', '.join(wrong) or 'none'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
