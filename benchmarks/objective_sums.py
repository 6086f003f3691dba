"""Whether the prices that ``planner explain`` shows sum to the objective: for every model of the library.

``python -m benchmarks.objective_sums [NAME …]`` plans each on 16 H100s and writes the relative error of each to
``benchmarks/results/objective_sums.md``. Models that are there already are left out unless they are named, so that it
may be stopped at any time.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import planner
from planner.library.configs import config_names

RESULTS = Path(__file__).parent / "results" / "objective_sums.md"
#: The largest relative error that rounding explains.
ROUNDING = 1e-9
_HEAD = """# Prices that `planner explain` shows, summed, against the plan's objective

Each model of the library on `dgx-h100:2`, 64 samples of 512 tokens; written by `python -m benchmarks.objective_sums`.

| model | relative error | CPU s |
|---|---|---|
"""


def relative_error(name: str) -> float:
    """Of the sum of all prices, to the objective of the model's plan."""
    plan = planner.plan(name, "dgx-h100:2", global_batch=64, seq_len=512, time_limit=20.0)
    prices = plan.explain("*").prices
    return abs(sum(prices.values()) / plan.certificate.objective - 1.0)


def row_of(name: str) -> str:
    """The model's row: its error, or why it has no plan."""
    start = time.process_time()
    try:
        error = f"{relative_error(name):.1e}"
    except ValueError as reason:
        error = "no plan: " + " ".join(str(reason).split())[:120].replace("|", "/")
    return f"| {name} | {error} | {time.process_time() - start:.1f} |"


def recorded() -> dict[str, str]:
    """The rows that were written, by model."""
    if not RESULTS.exists():
        return {}
    rows = [line for line in RESULTS.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {row.split("|")[1].strip(): row for row in rows if not row.startswith("| model")}


def is_wrong(row: str) -> bool:
    """Whether the row has an error that rounding does not explain."""
    error = row.split("|")[2].strip()
    return not error.startswith("no plan") and not float(error) <= ROUNDING


def main() -> int:
    """Print and record a line for each model; returns 1 if a sum is wrong."""
    rows = recorded()
    for name in sys.argv[1:] or [name for name in config_names() if name not in rows]:
        rows[name] = row_of(name)
        print(rows[name], flush=True)
        RESULTS.write_text(_HEAD + "\n".join(rows[each] for each in sorted(rows)) + "\n", encoding="utf-8")
    wrong = [name for name, row in rows.items() if is_wrong(row)]
    print(f"{len(rows)} of {len(config_names())} models, sums that are wrong: {', '.join(wrong) or 'none'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
