"""On a given mesh the gradients of a unit's parameters are reduced together, outside of its program."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import planner
from passes.capture import capture
from passes.fuse import as_planned
from passes.ir.conversions import Step, exists, step_between
from passes.ir.types import MeshShape
from passes.pipeline_cut import deferral_of, step_programs
from passes.plan import ConversionPlan, Plan
from passes.shard.context import Tree
from passes.shard.deferred import DeferredTree
from planner.sharding_ilp.bundles import bundles_of
from planner.sharding_ilp.sharding_prices import Pricing
from planner.verification.verify_model import slow_devices
from tests.small_models import seeded

SAMPLES = {"input:*": {"dp": "S(0)"}, "*.weight": {"dp": "I"}}
X = {"x": torch.randn(4096, 16, dtype=torch.float64)}


class Layers(nn.Module):
    """Three equal layers, and a head that has the scale of the first stretch too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x * self.scale
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": (self.head(x) * self.scale[:4]).square().mean()}


def plan_of(mesh: str, **options: object) -> Plan:
    return planner.plan(seeded(Layers), slow_devices(2), mesh=mesh, example_inputs=X, **options)  # type: ignore[arg-type]


def test_a_parameter_whose_gradient_is_partial_is_reduced_outside() -> None:
    deferral = deferral_of(plan_of("dp=2", constraints=SAMPLES))
    assert set(deferral) == {name for name, _ in Layers().named_parameters()}
    assert set(deferral.values()) == {("dp",)}


def test_programs_reduce_no_gradient_that_is_reduced_outside() -> None:
    plan = plan_of("dp=2", constraints=SAMPLES)
    graph = as_planned(capture(seeded(Layers), kwargs=X), plan)
    (stage,) = step_programs(graph, plan).stages
    assert not [one for one in stage.sharded.main.body if getattr(one, "backward", None)]
    assert len(stage.units) == 5 and stage.shared == ()


def test_a_parameter_that_is_cut_is_not_reduced() -> None:
    pins = {"layers.*.0.weight": {"tp": "S(0)"}, "layers.*.2.weight": {"tp": "S(1)"}}
    deferral = deferral_of(plan_of("tp=2", constraints=pins))
    assert not {name for name in deferral if name.endswith("weight") and name.startswith("layers")}


def test_one_collective_for_each_unit_is_planned() -> None:
    """Before the layers, each layer, behind them; the scale, which two units use, by itself."""
    reduced = [one for one in plan_of("dp=2", constraints=SAMPLES).collectives if one.phase == "backward"]
    assert [(one.collective, one.axis, one.count) for one in reduced] == [("all_reduce", "dp", 5)]
    # Every tensor begins at a multiple of eight elements.
    assert reduced[0].num_bytes == 8 * (16 + 3 * (16 * 32 + 32 + 32 * 16 + 16) + 16 * 4 + 8)


@pytest.mark.parametrize("latency", [0.0, 1e-3])
def test_shares_of_a_bundle_add_up_to_one_collective(latency: float) -> None:
    class Costs:
        def compute_seconds(self, *, flops: float, num_bytes: float, dtype: str, kind: str | None = None) -> float:
            return 0.0

        def collective_seconds(self, collective: str, *, num_bytes: float, axis: str) -> float:
            return latency + num_bytes * 1e-9

    graph = capture(seeded(Layers), kwargs=X)
    bundles = bundles_of(graph)
    pricing = Pricing(Costs(), MeshShape.parse("dp=2"), bundles)
    first = [state.value for state in graph.states if state.path.startswith("layers.1.")]
    assert {bundles[value.name] for value in first} == {8 * (16 * 32 + 32 + 32 * 16 + 16)}
    seconds = sum(pricing.step(Step(0, ("I",), ("R",)), value)[1] for value in first)
    assert seconds == pytest.approx(latency + 8 * (16 * 32 + 32 + 32 * 16 + 16) * 1e-9)


def test_axes_that_cut_another_dim_together_still_do_so_together() -> None:
    """One after the other, the inner axis would come to cut the dim before the outer one: rows of other ranks."""
    places = [("I", "S(1)"), ("S(0)", "S(1)"), ("S(0)", "S(0)"), ("S(1)", "S(1)")]
    steps = {
        target: ConversionPlan("state:w", "dp", source, target, 1, None, None, 0)
        for source, target in itertools.pairwise(places)
    }
    tree = DeferredTree(Tree(places[0], steps), frozenset({0}), MeshShape(("dp", "tp"), (2, 2)), "state:w")
    chain = tree.chain(places[-1], "w")
    assert [(one.source, one.target) for one in chain] == list(itertools.pairwise([("R", "S(1)"), *places[1:]]))
    assert all(exists(step_between(one.source, one.target)) for one in chain)
