"""Predicted against measured: plans run on this machine, whose cluster file ``planner profile`` wrote just before.

    python -m benchmarks.accuracy [--mbit 400] [--rounds 9] [--cluster FILE.toml] [--markdown FILE]

Plans of two models (``benchmarks.accuracy_plans``), each a step with AdamW in float32, by turns. Nothing was fitted to
any of them: the cluster file knows single operators and collectives. The table says each plan's predicted and measured
seconds, whether the interval holds, the rank correlation (Spearman) over the plans of a model, and how far the
planner's own choice is from the fastest measured.

Sixteen plans on two processes over gloo; with ``--mbit`` (as root, on Linux) 24 on two hosts of two processes each,
joined by a link of so many Mbit/s in each direction (``benchmarks.shaped_hosts``).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import correlation, median
from typing import Any

from benchmarks.accuracy_plans import MODELS
from benchmarks.ports import free_port
from benchmarks.shaped_hosts import divided_processors, run_on_hosts, shaped_hosts
from cost_models import Cluster

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, help="of the link between two hosts of two ranks each")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each plan, of two steps that are timed")
    parser.add_argument("--cluster", type=Path, help="a file of an earlier planner profile here")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, _ranks(options.mbit) as run:
        cluster = options.cluster or Path(folder) / "here.toml"
        if options.cluster is None:
            run("planner", "profile", "-o", str(cluster), "--device", "cpu", "--name", "here")
        output = Path(folder) / "rows.json"
        run("benchmarks.accuracy_worker", str(cluster), str(output), str(options.rounds))
        rows = json.loads(output.read_text(encoding="utf-8"))
        profile = Cluster.from_toml(cluster).profile
    machine = "a file of the caller" if profile is None else profile.machine
    text = "\n".join((*table(rows), "", *summary(rows))) + "\n"
    print(text)
    if options.markdown is not None:
        head = f"# Predicted and measured steps\n\n{machine}; medians of {options.rounds} turns of two steps.\n\n"
        options.markdown.write_text(head + text, encoding="utf-8")


@contextlib.contextmanager
def _ranks(mbit: float | None) -> Iterator[Callable[..., None]]:
    """What runs a module with its arguments on every rank; its output comes through."""
    if mbit is None:
        yield _run_on_ranks
        return
    with shaped_hosts(mbit) as hosts, divided_processors(RANKS * len(hosts)) as groups:
        yield functools.partial(run_on_hosts, hosts, per_host=RANKS, groups=groups)


def _run_on_ranks(*module: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, str(free_port()), "-m", *module], check=True, env=environment, cwd=ROOT)


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
    for model in MODELS:
        mine = [row for row in rows if row["name"].startswith(model)]
        chosen = [row for row in mine if "choice" in row["name"]]
        if len(mine) < 3 or not chosen:
            continue
        fastest = min(row["measured"] for row in mine)
        agreement = spearman([row["predicted"] for row in mine], [row["measured"] for row in mine])
        lines.append(
            f"{model}: Spearman {agreement:.2f} over {len(mine)} plans; the planner's choice ({chosen[0]['plan']}) "
            f"measured {chosen[0]['measured'] / fastest:.2f} times the fastest."
        )
    return lines


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of ranks (Spearman, 1904); equal values share the mean of their ranks."""
    return correlation(*(_mean_ranks(values) for values in (first, second)))


def _mean_ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values
    ]


if __name__ == "__main__":
    main()
