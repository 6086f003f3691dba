"""Whether the break-evens of ``planner robustness`` hold: plans, also with wishes, are searched again at 2%
before and behind each.

``python -m benchmarks.break_evens [MODEL …]`` prints a line for each plan; exits with 1 if a plan changes before its
factor, or not behind it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import planner
from cost_models import Cluster
from passes.ir.graph import Graph
from passes.plan import Plan
from planner.auditing.repriced_step import reprice
from planner.inspection.plan_graph import graph_of_plan
from planner.inspection.robustness import BEFORE, MARGIN, BreakEven, figures_of, robustness
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
    ours_before, ours_behind = (reprice(graph, plan, changed).seconds.total for changed in (before, behind))
    if (row.factor / outward - 1.0) * (row.factor - 1.0) > 0.0 and searched(graph, before, plan) < ours_before * (
        1.0 - MARGIN
    ):
        yield f"{row.figure} × {row.factor:.3g}: another plan wins before"
    usable = behind.device.usable_bytes * (1.0 - plan.step.headroom)
    fits = max(rank.total for rank in plan.step.memory) <= usable
    if fits and searched(graph, behind, plan) >= ours_behind:
        yield f"{row.figure} × {row.factor:.3g}: none wins behind"


def main() -> int:
    """Print a line for each plan."""
    wrong = 0
    for model, cluster, batch, seq_len, wishes in (*((*row, {}) for row in PLANS), *WISHED):
        if sys.argv[1:] and model not in sys.argv[1:]:
            continue
        plan = planner.plan(model, cluster, global_batch=batch, seq_len=seq_len, **wishes)
        start = time.process_time()
        rows = [row for row in robustness(plan) if row.factor is not None]
        seconds = time.process_time() - start
        with graph_of_plan(plan) as graph:
            texts = [text for row in rows for text in faults(graph, plan, row)]
        wrong += len(texts)
        asked = "".join(f", {name} {wish}" for name, wish in wishes.items())
        said = f"{len(rows)} break-evens in {seconds:.0f} CPU s: {'; '.join(texts) or 'hold'}"
        print(f"{model} on {cluster}{asked}: {said}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
