"""Predicted against measured: plans run on this machine, whose cluster file ``planner profile`` wrote just before.

    python -m benchmarks.accuracy [--rounds 9] [--cluster FILE.toml] [--markdown FILE]

Sixteen plans of two models on two processes over gloo (``benchmarks.accuracy_plans``), each a step with AdamW in
float32, by turns. Nothing was fitted to any of them: the cluster file knows single operators and collectives. The table
says each plan's predicted and measured seconds, whether the interval holds, the rank correlation (Spearman) over the
plans of a model, and how far the planner's own choice is from the fastest measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.accuracy_plans import CASES
from benchmarks.ports import free_port
from cost_models import Cluster

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="steps of each plan")
    parser.add_argument("--cluster", type=Path, help="a file of an earlier planner profile on two processes")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cluster = options.cluster or Path(folder) / "here.toml"
        if options.cluster is None:
            _on_ranks("-m", "planner", "profile", "-o", str(cluster), "--device", "cpu", "--name", "here")
        output = Path(folder) / "rows.json"
        _on_ranks("-m", "benchmarks.accuracy_worker", str(cluster), str(output), str(options.rounds))
        rows = json.loads(output.read_text(encoding="utf-8"))
        profile = Cluster.from_toml(cluster).profile
    machine = "a file of the caller" if profile is None else profile.machine
    text = "\n".join((*table(rows), "", *summary(rows))) + "\n"
    print(text)
    if options.markdown is not None:
        head = f"# Predicted and measured steps\n\n{machine}; medians of {options.rounds} steps by turns.\n\n"
        options.markdown.write_text(head + text, encoding="utf-8")


def _on_ranks(*command: str) -> None:
    """Run a script or module of this package on two processes; its output comes through."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, str(free_port()), *command], check=True, env=environment, cwd=ROOT)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each plan."""
    lines = ["| plan | axes | predicted | interval | measured | predicted / measured | bytes of state as planned |"]
    lines.append("|---|---|---:|---:|---:|---:|---|")
    for row in rows:
        low, high = row["interval"] or (math.nan, math.nan)
        same = all(row["held"][part] == row["memory"][part] for part in row["held"])
        lines.append(
            f"| {row['name']} | {row['plan']} | {row['predicted'] * 1e3:.1f} ms | {low * 1e3:.0f}–{high * 1e3:.0f} | "
            f"{row['measured'] * 1e3:.1f} ms | {row['predicted'] / row['measured']:.2f} | "
            f"{'yes' if same else _differing(row)} |"
        )
    return lines


def _differing(row: dict[str, Any]) -> str:
    return ", ".join(
        f"{part} {row['held'][part]:,} for {row['memory'][part]:,.0f}"
        for part in row["held"]
        if row["held"][part] != row["memory"][part]
    )


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Errors over all plans; of each model the rank correlation and the choice."""
    ratios = [row["predicted"] / row["measured"] for row in rows]
    errors = [abs(math.log(ratio)) for ratio in ratios]
    inside = sum(low <= row["measured"] <= high for row in rows if (ends := row["interval"]) for low, high in [ends])
    lines = [
        f"{len(rows)} plans: predicted / measured {median(ratios):.2f} in the middle, median error "
        f"{math.expm1(median(errors)):.0%}; {inside} measured within their interval."
    ]
    for model in dict.fromkeys(case.model for case in CASES):
        mine = [row for row in rows if row["name"].startswith(model)]
        chosen = [row for row in mine if "choice" in row["name"]]
        if len(mine) < 3 or not chosen:
            continue
        fastest = min(row["measured"] for row in mine)
        correlation = spearman([row["predicted"] for row in mine], [row["measured"] for row in mine])
        lines.append(
            f"{model}: Spearman {correlation:.2f} over {len(mine)} plans; the planner's choice ({chosen[0]['plan']}) "
            f"measured {chosen[0]['measured'] / fastest:.2f} times the fastest."
        )
    return lines


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of ranks (Spearman, 1904), of values that differ."""
    places = [_ranks(values) for values in (first, second)]
    distance = sum((one - other) ** 2 for one, other in zip(*places))
    count = len(first)
    return 1 - 6 * distance / (count * (count**2 - 1))


def _ranks(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0] * len(values)
    for rank, place in enumerate(order):
        ranks[place] = rank
    return ranks


if __name__ == "__main__":
    main()
