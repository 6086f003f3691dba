"""Bounds with an axis of experts: met where it is alone, never above a sharding; layouts published for mixtures."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest

from cost_models import Cluster
from passes.capture import capture
from passes.ir.graph import Graph
from planner.whole_step.candidates.demands import Demands, read_demands
from planner.whole_step.candidates.expert_layouts import BaselineSpace, Missing, Priced, best_of_baseline
from planner.whole_step.candidates.mesh_layout import Links, MeshLayout
from planner.whole_step.candidates.training_options import TrainingOptions
from planner.whole_step.costs.candidate_bounds import Bounds
from planner.whole_step.costs.level_one import LevelOne
from planner.whole_step.costs.sharding import Cut, ShardingSpace
from planner.whole_step.costs.unit_costs import StepUnits
from planner.whole_step.plan_step import plan_step
from tests.expert_models import mixture, mixture_batch

pytestmark = pytest.mark.usefixtures("models_traced_once")

DEVICES = 32


@functools.cache
def graph() -> Graph:
    return capture(mixture(num_experts=8, layers=4), kwargs=mixture_batch(batch=64, length=8))


def cluster(bandwidth: float) -> Cluster:
    return Cluster.uniform(
        DEVICES, flops=1e12, memory_bandwidth=1e11, latency=1e-9, bandwidth=bandwidth, memory_bytes=2**30
    )


@pytest.mark.parametrize("bandwidth", [1e8, 1e12])
def test_no_sharding_beats_the_bound_of_an_axis_of_experts(bandwidth: float) -> None:
    space = ShardingSpace.of(graph())
    level_one = LevelOne(cluster(bandwidth), space, StepUnits.of(space))
    for expert, context, tensor in [(2, 1, 1), (8, 1, 1), (2, 1, 2), (4, 1, 4), (2, 2, 1), (2, 2, 2)]:
        cut = Cut(4, context, tensor, expert)
        layout = MeshLayout(1, DEVICES // expert // context // tensor, context, tensor, expert=expert)
        links = Links.of(level_one.cluster, layout)
        sharded = level_one.sharded(cut, layout, links)
        assert sharded is not None
        assert 0 < level_one.least_of_operators(cut, layout, links) <= sharded.least_seconds * (1 + 1e-9), cut
        bound = Bounds(level_one, TrainingOptions()).by_axis(cut, float("inf"))
        assert 0 < bound <= sharded.without_samples * (1 + 1e-9), cut
        if context * tensor == 1:
            assert bound == pytest.approx(sharded.without_samples, rel=0.01)  # all but the loss's sums over ep


def boxes() -> Cluster:
    """Boxes of eight devices, whose links beyond them are slow and shared."""
    device = {"name": "small", "flops": {"float32": 1e12}, "memory_bytes": 2e9}
    device |= {"memory_bandwidth": 1e11, "launch_overhead": 1e-9}
    inside = {"name": "bus", "size": 8, "latency": 1e-9, "bandwidth": 1e10}
    between = {"name": "network", "size": DEVICES // 8, "latency": 1e-9, "bandwidth": 1e9, "shared_by": 8}
    return Cluster.from_dict({"name": "boxes", "device": device, "levels": [inside, between]})


def test_a_context_axis_around_experts_is_priced_where_it_lies() -> None:
    """Where its places lie in other boxes its bound is more than among neighbours, and met."""
    space = ShardingSpace.of(graph())
    level_one = LevelOne(boxes(), space, StepUnits.of(space))
    raised = 0
    for expert, context, tensor in [(2, 2, 1), (8, 2, 1), (4, 4, 1), (8, 4, 1), (4, 2, 2), (2, 4, 2), (4, 4, 2)]:
        cut, bounds = Cut(4, context, tensor, expert), Bounds(level_one, TrainingOptions())
        layout = MeshLayout(1, DEVICES // expert // context // tensor, context, tensor, expert=expert)
        sharded = level_one.sharded(cut, layout, Links.of(level_one.cluster, layout))
        assert sharded is not None
        near = max(bounds.scaled(cut), bounds.whole(cut))
        near = max(near, bounds._beside(cut, functools.partial(bounds.rest.by_axis, enough=float("inf"))))
        bound = bounds.by_axis(cut, float("inf"))
        assert near <= bound * (1 + 1e-9) and bound <= sharded.without_samples * (1 + 1e-9), cut
        assert bounds.scaled(cut) == pytest.approx(bound)
        assert bounds.scaled(cut._replace(pieces=8)) <= bound
        is_far = expert * context * tensor > level_one.cluster.levels[0].group_size
        raised += is_far and bound > near * 1.001
        if tensor == 1:
            assert bound == pytest.approx(sharded.without_samples, rel=0.02), cut
    assert raised >= 3


def test_a_published_layout_of_experts_is_beside_the_plan_and_no_faster() -> None:
    plan = plan_step(graph(), cluster(1e9), read_demands({"cp": 1, "tp": 1}))  # as the published one
    published = best_of_baseline(
        "gpt-oss-120b", BaselineSpace(graph(), config=SimpleNamespace(model_type="gpt_oss")), cluster(1e9), Demands()
    )
    assert isinstance(published, Priced)
    step = published.plan().step
    assert (step.axes["pp"], step.axes["ep"], step.axes["dp"]) == (4, 8, 1)
    assert plan.step.costs.simulated <= published.simulated * (1 + 1e-9)
    for_others = best_of_baseline("gpt-oss-120b", BaselineSpace(graph()), cluster(1e9), Demands())
    assert for_others == Missing("gpt-oss-120b", "published for models of type gpt_oss")
