"""Plans of a step whose copies of a block differ: pairs of layers as one where columns and rows alternate."""

from __future__ import annotations

import torch
from torch import nn

import planner
from cost_models import Cluster
from passes.ir.graph import Graph
from planner.planning import capture_for_planning
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.costs.longer_blocks import UnlikeCopies
from planner.whole_step.plan_step import _Planner, plan_step

#: Splitting pays, and every collective costs a while, so that half as many are better.
CLUSTER = Cluster.uniform(2, flops=1e9, memory_bandwidth=1e10, latency=5e-6, bandwidth=1e10)
DEMANDS = read_demands({"tp": 2, "recompute": "none"}, gap=0.0, time_limit=600.0)


class Tower(nn.Module):
    def __init__(self, depth: int = 8, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def tower() -> tuple[nn.Module, tuple[torch.Tensor, ...], Graph]:
    torch.manual_seed(0)
    model, batch = Tower().double(), (torch.randn(8, 32, dtype=torch.float64),)
    return model, batch, capture_for_planning(model, example_inputs=batch)


def test_columns_and_rows_alternate_over_the_copies() -> None:
    """As fast as where every layer is split for itself; with all alike, every layer reduces or gathers."""
    model, batch, graph = tower()
    plan = plan_step(graph, CLUSTER, DEMANDS)
    assert [len(block.roots[0]) for block in plan.blocks] == [2]
    apart = _Planner(graph, DEMANDS, None, None).with_blocks(())
    _, outcome = apart.search(CLUSTER, DEMANDS)
    assert plan.certificate.objective <= outcome.solutions[0].seconds * (1 + 1e-9)
    _, alike = _Planner(graph, DEMANDS, None, None).search(CLUSTER, DEMANDS)
    assert plan.certificate.objective < 0.95 * alike.solutions[0].seconds
    report = planner.verify(model, plan, batch=batch, steps=1)
    assert report.ok, report.table()


def test_what_unlike_copies_may_gain_is_bounded() -> None:
    _, _, graph = tower()
    planning = _Planner(graph, DEMANDS, None, None)
    search, outcome = planning.search(CLUSTER, DEMANDS)
    _, apart = planning.with_blocks(()).search(CLUSTER, DEMANDS)
    alike = search.sharded(outcome.solutions[0].candidate)
    assert alike is not None
    least = UnlikeCopies(search).least_seconds(alike)
    assert least <= apart.solutions[0].sharded.seconds * (1 + 1e-9) < alike.seconds
    assert UnlikeCopies(search).may_gain(outcome)


def test_the_certificate_says_that_copies_are_alike() -> None:
    _, _, graph = tower()
    assert plan_step(graph, CLUSTER, DEMANDS).certificate.status == "optimal with alike copies"
    whole = read_demands({"tp": 1, "cp": 1}, time_limit=600.0)
    assert plan_step(graph, CLUSTER, whole).certificate.status == "optimal"
