"""A whole step's plan, saved and priced again from scratch, costs what the search said: seconds and bytes."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

pytest.importorskip("transformers")

from torch import nn

from cost_models import Cluster
from passes.capture import capture
from passes.ir.graph import Graph
from passes.plan import ConversionPlan, Plan
from planner.auditing.repriced_step import RepricedStep, reprice
from planner.library import load_config
from planner.planning import capture_for_planning
from planner.verification.verify_model import slow_devices
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.plan_step import plan_step
from tests.cells import cells
from tests.small_models import Mlp, Residual, mlp_batch, squared_error

pytestmark = pytest.mark.usefixtures("models_traced_once")

#: Name in the library → what makes it small.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "tiny-llama": {},
    "tiny-gpt2": {},  # tied embeddings
    "tiny-bert": {},
    "tiny-t5": {},
    "tiny-vit": {},
    "tiny-bloom": {},
    "bart-base": {"encoder_layers": 2, "decoder_layers": 2},
    "qwen2.5-0.5b": {"num_hidden_layers": 3},
    "gemma-2b": {"num_hidden_layers": 3},
    "falcon-7b": {"num_hidden_layers": 3},  # attention beside the feed-forward part
    "resnet-50": {"depths": [1, 2, 1, 1]},
}
#: What is fixed; every size and value occurs, and what goes together differs.
FIXED: tuple[Mapping[str, Any], ...] = (
    {"micro_batch": 4, "tp": 1, "cp": 1},
    {"pp": 2, "tp": 2, "zero": 1, "recompute": "full", "num_microbatches": 4},
    {"dp": 8, "zero": 0},
    {"pp": 2, "dp": 4, "zero": 3, "recompute": "selective", "schedule": "gpipe", "num_microbatches": 4},
    {"tp": 4, "pp": 1, "zero": 2, "recompute": ("none", "regather")},
    {"pp": 2, "tp": 4, "schedule": "zbv", "num_microbatches": 4},
    {"cp": 2, "tp": 2, "pp": 1, "zero": 3, "num_microbatches": 2},
    {"pp": 2, "dp": 2, "schedule": "interleaved_1f1b", "chunks_per_rank": 2, "zero": 2, "num_microbatches": 4},
    {"pp": 4, "dp": 2, "schedule": "1f1b", "zero": 0, "recompute": "full", "num_microbatches": 4},
    {"pp": 2, "dp": 4, "schedule": "zb_h1", "zero": 1, "num_microbatches": 4},
    {"pp": 2, "cp": 2, "tp": 1, "zero": 2, "recompute": ("selective", "none")},
    {"pp": 2, "tp": 2, "schedule": "dualpipev", "zero": 3, "num_microbatches": 8},
)
#: How many sets of fixed choices each model is planned with: all of them meet ``tiny-llama``.
TURNS = len(cells([0], [1]))
#: Where samples are mixed (statistics of batch norm), which is only planned with one micro-batch.
WHOLE_BATCH: tuple[Mapping[str, Any], ...] = ({"dp": 8, "zero": 3}, {"pp": 2, "dp": 4, "num_microbatches": 1})
CLUSTERS = (slow_devices(8), Cluster.parse("dgx-h100"), Cluster.parse("cpu-local:8"))


@functools.cache
def captured(model: str) -> Graph:
    if model == "blocks":
        blocks = nn.Sequential(*(Residual(16, 32) for _ in range(6)))
        return capture(blocks, args=mlp_batch(batch=32, outputs=16), loss_fn=squared_error)
    if model == "mlp":
        return capture(Mlp(layers=6), args=mlp_batch(batch=32), loss_fn=squared_error)
    config = load_config(model)
    for name, value in MODELS[model].items():
        setattr(config, name, value)
    return capture_for_planning(config, batch_size=32, seq_len=32)


def priced(graph: Graph, plan: Plan, cluster: Cluster) -> RepricedStep:
    """From nothing but what a file would hold."""
    return reprice(graph, Plan.from_dict(json.loads(plan.to_json())), cluster)


def counted(conversions: Iterable[ConversionPlan]) -> list[ConversionPlan]:
    return sorted(conversions, key=lambda each: (each.value, each.target))


def check(graph: Graph, cluster: Cluster, fixed: Mapping[str, Any]) -> bool:
    """Whether there is a plan; if so it costs what it says."""
    try:
        plan = plan_step(graph, cluster, read_demands(fixed, gap=0.5))  # any plan, not the fastest
    except ValueError:
        return False
    assert plan.step is not None
    again = priced(graph, plan, cluster)
    assert again.seconds.total == pytest.approx(plan.certificate.objective, rel=1e-6)
    assert again.seconds.total == pytest.approx(plan.step.costs.seconds, rel=1e-6)
    assert again.simulated().seconds == pytest.approx(plan.step.costs.simulated, rel=1e-6)
    assert again.memory == pytest.approx([rank.total for rank in plan.step.memory], rel=1e-6)
    for ours, said, total in zip(again.parts, plan.step.memory, again.memory):
        assert dataclasses.astuple(ours) == pytest.approx(dataclasses.astuple(said), abs=1e-6 * total)
    assert counted(again.walk.conversions) == counted(plan.conversions)
    assert again.walk.costs.total == pytest.approx(plan.costs.total, rel=1e-6)
    forward = [sum(costs.forward * count for costs, count in chunk.layers) for chunk in again.step.chunks]
    assert forward == pytest.approx([chunk.forward for chunk in plan.step.chunks], rel=1e-6)
    return True


@pytest.mark.parametrize("model", [name for name in MODELS if name != "tiny-llama"])
def test_objective_is_the_price_from_scratch(model: str) -> None:
    first = 2 * list(MODELS).index(model)
    cases = WHOLE_BATCH if model == "resnet-50" else [FIXED[(first + turn) % len(FIXED)] for turn in range(TURNS)]
    differences = [
        check(captured(model), CLUSTERS[(first + turn) % len(CLUSTERS)], fixed) for turn, fixed in enumerate(cases)
    ]
    assert any(differences), f"{model} has no plan"


@pytest.mark.parametrize("case", range(len(FIXED)))
def test_every_kind_of_plan_is_priced(case: int) -> None:
    assert check(captured("tiny-llama"), CLUSTERS[case % len(CLUSTERS)], FIXED[case])


@pytest.mark.parametrize("model", ["mlp", "blocks"])
@pytest.mark.parametrize("fixed", [{"pp": 2, "dp": 4}, {"pp": 4, "tp": 2}])
def test_blocks_with_and_without_a_stretch_before_them(model: str, fixed: Mapping[str, Any]) -> None:
    assert check(captured(model), CLUSTERS[0], fixed)


def test_chunks_that_the_graph_does_not_have_are_refused() -> None:
    graph, cluster = captured("tiny-llama"), CLUSTERS[0]
    plan = plan_step(graph, cluster, read_demands({"pp": 2, "tp": 1, "cp": 1, "zero": 0, "schedule": "1f1b"}))
    assert plan.step is not None
    first, last = plan.step.chunks
    short = dataclasses.replace(plan.step, chunks=(first, dataclasses.replace(last, groups=last.groups[:-1])))
    with pytest.raises(ValueError, match="chunks end at"):
        reprice(graph, dataclasses.replace(plan, step=short), cluster)
    swapped = dataclasses.replace(plan.step, chunks=(last, first))
    with pytest.raises(ValueError, match="chunk 0 on rank 1, schedule '1f1b' on 0"):
        reprice(graph, dataclasses.replace(plan, step=swapped), cluster)
    renumbered = (dataclasses.replace(last, rank=0), dataclasses.replace(first, rank=1))
    with pytest.raises(ValueError, match="the graph"):
        reprice(graph, dataclasses.replace(plan, step=dataclasses.replace(plan.step, chunks=renumbered)), cluster)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_reductions_of_a_step_slow_compute_once(num_microbatches: int) -> None:
    """ZeRO 0 reduces gradients once a step, however many micro-batches there are."""
    cluster = slow_devices(8)
    group = cluster.groups[0]
    slowed = dataclasses.replace(
        cluster, groups=(dataclasses.replace(group, device=dataclasses.replace(group.device, overlap_slowdown=0.25)),)
    )
    fixed = {"dp": 8, "zero": 0, "recompute": "none", "num_microbatches": num_microbatches}
    seconds = []
    for each in (cluster, slowed):
        plan = plan_step(captured("mlp"), each, read_demands(fixed))
        chunks = priced(captured("mlp"), plan, each).step.chunks
        layers = [(costs, count) for chunk in chunks for costs, count in chunk.layers]
        assert all(costs.reduce_step < costs.backward for costs, _ in layers)
        seconds.append(num_microbatches * sum(costs.backward * count for costs, count in layers))
    reduced = sum(costs.reduce_step * count for costs, count in layers)
    assert seconds[1] - seconds[0] == pytest.approx(0.25 * reduced, rel=1e-9)
