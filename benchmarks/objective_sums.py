"""Whether the prices that ``planner explain`` shows sum to the objective: for every model of the library.

``python -m benchmarks.objective_sums [NAME …]`` plans each on 16 H100s and prints the largest relative error.
"""

from __future__ import annotations

import sys
import time

import planner
from planner.library.configs import config_names


def relative_error(name: str) -> float:
    """Of the sum of all prices, to the objective of the model's plan."""
    plan = planner.plan(name, "dgx-h100:2", global_batch=64, seq_len=512, time_limit=20.0)
    prices = plan.explain("*").prices
    return abs(sum(prices.values()) / plan.certificate.objective - 1.0)


def main() -> int:
    """Print a line for each model; returns 1 if a sum is wrong."""
    worst = 0.0
    for name in sys.argv[1:] or config_names():
        start = time.process_time()
        try:
            error = relative_error(name)
        except ValueError as reason:
            print(f"{name}: no plan: {str(reason)[:120]}", flush=True)
            continue
        worst = max(worst, error)
        print(f"{name}: {error:.1e} ({time.process_time() - start:.1f} s)", flush=True)
    print(f"largest relative error {worst:.1e}")
    return int(worst > 1e-9)


if __name__ == "__main__":
    sys.exit(main())
