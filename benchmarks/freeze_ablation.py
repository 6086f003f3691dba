"""PipeTransformer's parts one after the other, simulated on the machines of the paper: what each adds to freezing.

A training is ten epochs unless said (an assumption), and a decision after each freezes the most that the adaptive rule
allows. The pipeline is that of the paper (one over the eight GPUs of a machine, replicas over machines, GPipe's
schedule), and is halved by the paper's rule; the batch of a step stays as it is. Every plan is the search's for that
layout, and at each freeze the shortest path of `planner.training_timeline` replans or does not. The cache is read and
written beside the steps, as a loader prefetches: an epoch lasts as long as its steps or its cache's bytes, whichever is
longer; one row adds the two.

python -m benchmarks.freeze_ablation
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from cost_models import Cluster
from passes.plan import Plan
from planner.changing.freeze_policy import freeze_bound, halved_pipeline
from planner.changing.freeze_schedule import FreezePhase
from planner.library.configs import load_config
from planner.planning import as_module, plan
from planner.training_programs import PhaseProgram
from planner.training_timeline import TrainingTimeline, freeze_first, layers_of, shortest
from runtime.calls.skeleton import skeleton
from runtime.migration.move_price import REPLAN_SECONDS, step_seconds

BOXES = Path(__file__).parents[1] / "examples" / "clusters" / "rtx-5000-boxes.toml"
MACHINES = 2


@dataclass(frozen=True)
class FineTuning:
    """A training of the paper: per-pipeline batch as there, `num_tokens` of a sample's hidden states."""

    name: str
    model: str
    num_samples: int
    pipeline_batch: int
    num_tokens: int
    seq_len: int | None = None

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.pipeline_batch * MACHINES


TRAININGS = (
    FineTuning("ViT-B/16 on ImageNet", "vit-base", 1_281_167, 400, 197),
    FineTuning("BERT-large on SQuAD 1.1", "bert-large", 87_599, 64, 384, seq_len=384),
)


@dataclass(frozen=True)
class Variant:
    """Which parts are on.

    Attributes:
        prefetches: whether the cache is read and written beside the steps, else before and after them.
        pipeline: stages at first.
        searches: whether the search says how many micro-batches there are; else as many as the paper's program has.
    """

    name: str
    freezes: bool = False
    shortens: bool = False
    replicates: bool = False
    caches: bool = False
    prefetches: bool = True
    pipeline: int = 8
    searches: bool = False

    def layout(self, boxes: Cluster, num_layers: int, frozen: int) -> tuple[int, int]:
        """Sizes of pp and dp: as many replicas as there is room for, or as many as at first."""
        length = halved_pipeline(num_layers, frozen, self.pipeline) if self.shortens else self.pipeline
        return length, boxes.num_devices // (length if self.replicates else self.pipeline)


_PARTS: dict[str, dict[str, Any]] = {
    "no freezing": {},
    "freezing alone": {"freezes": True},
    "shorter pipeline and cache": {"freezes": True, "shortens": True, "caches": True},
    "shorter pipeline and replicas": {"freezes": True, "shortens": True, "replicates": True},
    "all": {"freezes": True, "shortens": True, "replicates": True, "caches": True},
    "all, cache beside no step": {
        "freezes": True, "shortens": True, "replicates": True, "caches": True, "prefetches": False
    },
}  # fmt: skip
#: What a table compares with its first row; the first table is the paper's figure.
TABLES = {
    "micro-batches as published": [Variant(name, **parts) for name, parts in _PARTS.items()],
    "micro-batches by the search": [Variant(name, searches=True, **parts) for name, parts in _PARTS.items()],
    "no pipeline": [
        Variant("no freezing", pipeline=1),
        Variant("freezing alone", freezes=True, pipeline=1),
        Variant("freezing and cache", freezes=True, caches=True, pipeline=1),
    ],
}


@dataclass(frozen=True)
class Outcome:
    """A variant's training.

    Attributes:
        cache_seconds: by which the cache makes it longer than its steps.
        first_cached: the epoch from which the cache is read, None if it is not.
    """

    timeline: TrainingTimeline
    cache_seconds: float
    first_cached: int | None

    @property
    def seconds(self) -> float:
        return self.timeline.seconds + self.cache_seconds


def cached_layers(frozen: Sequence[int], first_cached: int | None) -> list[int]:
    """Layers whose outputs an epoch reads: those that were frozen in the epoch before it, from ``first_cached`` on."""
    if first_cached is None:
        return [0] * len(frozen)
    return [frozen[epoch - 1] if epoch >= first_cached else 0 for epoch in range(len(frozen))]


def cache_passes(cached: Sequence[int]) -> list[int]:
    """How often each epoch passes over the cache: to read it, and to write deeper outputs that the next one reads."""
    return [(layers > 0) + (deeper > layers) for layers, deeper in zip(cached, [*cached[1:], 0])]


def fastest(
    frozen: Sequence[int], variant: Variant, train: Callable[[list[int]], TrainingTimeline], pass_seconds: float
) -> Outcome:
    """The training that reads the cache from the best epoch on, or never.

    Args:
        frozen: layers, of each epoch.
        train: the timeline for the layers that each epoch reads from the cache.
        pass_seconds: of reading or writing the outputs of all samples once.
    """
    outcomes = []
    for start in [None, *(epoch for epoch in range(1, len(frozen)) if variant.caches and frozen[epoch - 1])]:
        cached = cached_layers(frozen, start)
        timeline = train(cached)
        beside = [each.phase.num_steps * step_seconds(each.plan) * variant.prefetches for each in timeline.phases]
        longer = sum(max(0.0, passes * pass_seconds - seconds) for passes, seconds in zip(cache_passes(cached), beside))
        outcomes.append(Outcome(timeline, longer, start))
    return min(outcomes, key=lambda outcome: outcome.seconds)


def resized(boxes: Cluster, num_devices: int) -> Cluster:
    """The same two machines with fewer devices in each."""
    inner, outer = boxes.levels
    (group,) = boxes.groups
    share = num_devices * inner.group_size // boxes.num_devices
    levels = (replace(inner, group_size=share), replace(outer, group_size=num_devices, shared_by=share))
    return replace(boxes, groups=(replace(group, count=num_devices),), levels=levels)


def published_microbatches(stages: int, local_batch: int) -> int:
    """Six in eight stages, else four for each stage, as the paper's program has it; more if they do not divide."""
    least = 6 if stages == 8 else 4 * stages
    return next(number for number in range(least, local_batch + 1) if local_batch % number == 0)


def _pipelined(stages: int, local_batch: int, searches: bool) -> dict[str, Any]:
    """What is fixed of a pipeline: GPipe, as the paper's program; what is recomputed is the search's."""
    if stages == 1:
        return {}
    fix: dict[str, Any] = {"schedule": "gpipe"}
    return fix if searches else {**fix, "num_microbatches": published_microbatches(stages, local_batch)}


@cache
def plan_of(training: FineTuning, layout: tuple[int, int], frozen: int, cached: int, searches: bool) -> Plan:
    """The plan of a step whose first ``cached`` layers are not there, and ``frozen`` of all layers frozen.

    The embeddings stay, and one layer at least: a step is no faster than predicted here.
    """
    config = load_config(training.model)
    cached = min(cached, config.num_hidden_layers - 1)
    names = layers_of(as_module(config, dtype="float32"))
    config.num_hidden_layers -= cached
    module = skeleton(as_module(config, dtype="float32"))
    freeze_first(module, names[: frozen - cached])
    pp, dp = layout
    cluster = resized(Cluster.from_toml(BOXES), pp * dp)
    fix = {"pp": pp, "dp": dp, "tp": 1, "cp": 1, "zero": 0, **_pipelined(pp, training.batch // dp, searches)}
    return plan(module, cluster, global_batch=training.batch, seq_len=training.seq_len, fix=fix)


def simulate(training: FineTuning, variant: Variant, epochs: int, alpha: float, cache_bandwidth: float) -> Outcome:
    """A whole training.

    Args:
        alpha: of the adaptive rule.
        cache_bandwidth: bytes a second that a machine reads or writes of its cache.
    """
    boxes = Cluster.from_toml(BOXES)
    config = load_config(training.model)
    num_layers = config.num_hidden_layers
    steps = training.num_samples // training.batch
    frozen = [freeze_bound(num_layers, alpha, epoch) if variant.freezes else 0 for epoch in range(epochs)]
    phases = tuple(FreezePhase(epoch * steps, steps, layers) for epoch, layers in enumerate(frozen))

    def planned(layers: int, cached: int) -> Plan:
        return plan_of(training, variant.layout(boxes, num_layers, layers), layers, cached, variant.searches)

    def train(cached: list[int]) -> TrainingTimeline:
        plans = [planned(*layers) for layers in zip(frozen, cached)]
        programs = [[PhaseProgram(plan)] for plan in plans]
        return TrainingTimeline(shortest(phases, programs, boxes, REPLAN_SECONDS), plans[0], num_layers)

    num_bytes = 4 * training.num_tokens * config.hidden_size * training.num_samples
    return fastest(frozen, variant, train, num_bytes / (MACHINES * cache_bandwidth))


def row(variant: Variant, outcome: Outcome, baseline: float) -> str:
    """A row of the table: hours, speedup, the mesh and seconds of a step of each epoch."""
    epochs = "; ".join(
        f"{each.plan.step.axes['pp']}×{each.plan.step.axes['dp']} {step_seconds(each.plan):.2f}"
        for each in outcome.timeline.phases
    )
    start = (
        "" if outcome.first_cached is None else f"epoch {outcome.first_cached}, {outcome.cache_seconds / 3600:.2f} h"
    )
    return f"| {variant.name} | {outcome.seconds / 3600:.2f} | {baseline / outcome.seconds:.2f} | {start} | {epochs} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--alpha", type=float, default=1 / 3, help="of the adaptive rule")
    parser.add_argument("--cache-bandwidth", type=float, default=2e9, help="bytes a second of a machine's cache")
    parser.add_argument("--models", nargs="+", choices=[each.model for each in TRAININGS])
    options = parser.parse_args()
    for training in TRAININGS:
        if options.models and training.model not in options.models:
            continue
        for title, variants in TABLES.items():
            print(f"\n## {training.name}: {title}\n\n| parts | hours | times as fast | cache | pp×dp and seconds of a "
                  "step, by epoch |\n|---|---|---|---|---|", flush=True)  # fmt: skip
            outcomes = []
            for variant in variants:
                outcomes.append(simulate(training, variant, options.epochs, options.alpha, options.cache_bandwidth))
                print(row(variant, outcomes[-1], outcomes[0].seconds), flush=True)


if __name__ == "__main__":
    main()
