"""Whether the break-evens of ``planner robustness`` hold: plans, also with wishes, are searched again at 2%
before and behind each.

``python -m benchmarks.break_evens [MODEL …]`` prints a line for each plan, and writes it to
``benchmarks/results/break_evens.md``; plans that are there already are left out unless their model is named. Exits with
1 if a plan changes before its factor, or not behind it.

``python -m benchmarks.break_evens --between N MODEL …`` searches instead at N factors between 1 and each break-even, or
the largest factor where there is none, and prints where a plan wins there.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import planner
from cost_models import Cluster
from passes.ir.graph import Graph
from passes.plan import Plan
from planner.auditing.repriced_step import reprice
from planner.inspection.cluster_figures import figures_of
from planner.inspection.plan_graph import graph_of_plan
from planner.inspection.robustness import BEFORE, LARGEST, MARGIN, BreakEven, least_seconds, robustness
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.candidates.training_options import TrainingOptions
from planner.whole_step.costs.fusion import fuse
from planner.whole_step.costs.level_one import LevelOne
from planner.whole_step.costs.sharding import ShardingSpace
from planner.whole_step.costs.unit_costs import StepUnits

#: Model, cluster, samples in a step, tokens in a sample.
PLANS: tuple[tuple[str, str, int, int | None], ...] = (
    ("gpt2", "dgx-a100-80g:1", 64, 512),
    ("gpt2-xl", "dgx-v100-16g:2", 64, 1024),
    ("bert-large", "8x-rtx3090:1", 64, 512),
    ("t5-base", "dgx-a100-40g:1", 64, 512),
    ("vit-large", "dgx-h100:1", 256, None),
    ("opt-1.3b", "8x-rtx4090:1", 32, 1024),
    ("qwen2.5-7b", "dgx-h100:1", 32, 4096),
    ("llama-3-8b", "dgx-h100:1", 32, 4096),
    ("llama-3-8b", "dgx-h100:4", 64, 8192),
    ("mistral-7b", "dgx-a100-80g:2", 64, 4096),
    ("gemma-2-9b", "dgx-h100:2", 64, 4096),
    ("llama-2-13b", "dgx-h100:2", 64, 4096),
)
#: The same with wishes, which the searches at other figures must keep, as ``planner.plan`` takes them.
WISHED: tuple[tuple[str, str, int, int | None, dict[str, Any]], ...] = (
    ("gpt2", "dgx-a100-80g:1", 64, 512, {"fix": {"tp": 2}}),
    ("bert-large", "8x-rtx3090:1", 64, 512, {"fix": {"pp": 2}, "forbid": {"recompute": "full"}}),
    ("llama-3-8b", "dgx-h100:1", 32, 4096, {"fix": {"zero": 1}, "compiled": True}),
    ("qwen2.5-7b", "dgx-h100:1", 32, 4096, {"fix": {"recompute": "none"}, "memory_limit": 60 * 2**30}),
    ("gpt2-xl", "dgx-v100-16g:2", 64, 1024, {"optimizer": "sgd", "gradient_dtype": "float32"}),
)


#: Integer programs of each search: no clock stops one, so that a busy machine gives the same rows.
MAX_PROGRAMS = 150
RESULTS = Path(__file__).parent / "results" / "break_evens.md"
_HEAD = """# Break-evens of `planner robustness`, each searched again at 2% before and behind

Written by `python -m benchmarks.break_evens`; searches stop after 150 programs, never by the clock. *Holds*: at every
break-even no plan is faster by more than 1% just before it, and another plan is faster just behind. *Proved to*: the
share by which a plan may be faster before a break-even by the lower bounds of the searches there; 1.0% if all proved.

| plan | break-evens | not proved | proved to | searches | CPU s | |
|---|---|---|---|---|---|---|
"""


def searched(graph: Graph, cluster: Cluster, plan: Plan) -> float:
    """Seconds of the best plan on a cluster that is what ``plan`` was asked to be; infinite if nothing fits."""
    step, asked = plan.step, plan.certificate.demands
    demands = read_demands(
        asked.get("fix"),
        asked.get("forbid"),
        headroom=step.headroom,
        memory_limit=asked.get("memory_limit"),
        training=TrainingOptions(step.optimizer, step.gradient_dtype or None),
        compiled=step.compiled,
        time_limit=math.inf,
        max_programs=MAX_PROGRAMS,
    )
    space = ShardingSpace.of(graph, fusion=fuse(graph) if step.compiled else None, pins=plan.constraints)
    level_one = LevelOne(cluster, space, StepUnits.of(space, compiled=step.compiled))
    solutions = Search(level_one, cluster, demands).run().solutions
    return solutions[0].seconds if solutions else float("inf")


def faults(graph: Graph, plan: Plan, row: BreakEven) -> Iterator[str]:
    """What is wrong with one break-even."""
    cluster = Cluster.from_dict(dict(plan.cluster))
    figure = next(figure for figure in figures_of(cluster) if figure.name == row.figure)
    assert row.factor is not None
    outward = 1.0 + BEFORE if row.larger else 1.0 - BEFORE
    before, behind = (figure.at(cluster, row.factor * step) for step in (1 / outward, outward))
    ours_before, ours_behind = (least_seconds(reprice(graph, plan, changed)) for changed in (before, behind))
    if (row.factor / outward - 1.0) * (row.factor - 1.0) > 0.0 and searched(graph, before, plan) < ours_before * (
        1.0 - MARGIN
    ):
        yield f"{row.figure} × {row.factor:.3g}: another plan wins before"
    usable = behind.device.usable_bytes * (1.0 - plan.step.headroom)
    fits = max(rank.total for rank in plan.step.memory) <= usable
    if fits and searched(graph, behind, plan) >= ours_behind:
        yield f"{row.figure} × {row.factor:.3g}: none wins behind"


def faults_between(graph: Graph, plan: Plan, row: BreakEven, count: int) -> Iterator[str]:
    """At which of ``count`` factors, evenly between 1 and where another plan wins or figures end, one wins already."""
    cluster = Cluster.from_dict(dict(plan.cluster))
    figure = next(figure for figure in figures_of(cluster) if figure.name == row.figure)
    end = row.factor or (LARGEST if row.larger else 1.0 / LARGEST)
    for place in range(1, count + 1):
        factor = end ** (place / (count + 1))
        changed = figure.at(cluster, factor)
        ours = least_seconds(reprice(graph, plan, changed))
        if searched(graph, changed, plan) < ours * (1.0 - MARGIN):
            yield f"{row.figure} × {factor:.3g}: another plan wins, said to from × {end:.3g} on"


def between(models: Sequence[str], count: int) -> int:
    """Print for each plan of ``models`` what ``faults_between`` says."""
    wrong = 0
    for model, cluster, batch, seq_len in PLANS:
        if model in models:
            limits = {"time_limit": math.inf, "max_programs": MAX_PROGRAMS}
            plan = planner.plan(model, cluster, global_batch=batch, seq_len=seq_len, **limits)
            rows = [row for row in robustness(plan, **limits) if not row.figure.startswith("memory of")]
            with graph_of_plan(plan) as graph:
                texts = [text for row in rows for text in faults_between(graph, plan, row, count)]
            wrong += len(texts)
            print(f"{model} on {cluster}, {count * len(rows)} factors: {'; '.join(texts) or 'none wins'}", flush=True)
    return int(wrong > 0)


def row_of(model: str, cluster: str, batch: int, seq_len: int | None, wishes: Mapping[str, Any]) -> str:
    """The row of one plan."""
    plan = planner.plan(
        model, cluster, global_batch=batch, seq_len=seq_len, time_limit=math.inf, max_programs=MAX_PROGRAMS, **wishes
    )
    start = time.process_time()
    rows = robustness(plan, time_limit=math.inf, max_programs=MAX_PROGRAMS)
    seconds = time.process_time() - start
    with_factor = [row for row in rows if row.factor is not None]
    with graph_of_plan(plan) as graph:
        texts = [text for row in with_factor for text in faults(graph, plan, row)]
    unproved = sum(not row.proved for row in rows)
    proved_to = max(row.proved_to for row in rows)
    cells = [len(with_factor), f"{unproved} of {len(rows)}", f"{proved_to:.1%}", sum(row.searches for row in rows)]
    return " | ".join(map(str, [*cells, f"{seconds:.0f}", "; ".join(texts) or "holds"]))


def recorded() -> dict[str, str]:
    """The rows that were written, by plan."""
    if not RESULTS.exists():
        return {}
    lines = [line.strip("| ") for line in RESULTS.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return dict(line.split(" | ", 1) for line in lines if not line.startswith("plan |"))


def main() -> int:
    """Print and record a line for each plan that has none yet, or whose model is named."""
    if sys.argv[1:2] == ["--between"]:
        return between(sys.argv[3:], int(sys.argv[2]))
    known, names = recorded(), {}
    for model, cluster, batch, seq_len, wishes in (*((*row, {}) for row in PLANS), *WISHED):
        name = f"{model} on {cluster}" + "".join(f", {key} {wish}" for key, wish in wishes.items())
        names[name] = None
        if model in sys.argv[1:] or (not sys.argv[1:] and name not in known):
            known[name] = row_of(model, cluster, batch, seq_len, wishes)
            print(f"{name} | {known[name]}", flush=True)
            RESULTS.write_text(_HEAD + "".join(f"| {each} | {known[each]} |\n" for each in known), encoding="utf-8")
    held = [name for name in names if known.get(name, "").endswith("holds")]
    print(f"{len(held)} of {len(names)} plans hold, {sum(name in known for name in names)} were searched")
    return int(len(held) < len(names))


if __name__ == "__main__":
    sys.exit(main())
