"""Copies of a block may differ: longer blocks where that pays, and bounds that hold for plans of any copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import planner
from cost_models import Cluster
from passes.ir.graph import Graph
from passes.ir.types import MeshShape
from passes.plan import Plan
from passes.repeats.repeated_blocks import find_blocks, grouped
from planner.auditing.graph_walk import price
from planner.planning import plan_graph
from planner.sharding_ilp import search
from tests.search_cases import Linears, Stack, UnitCosts, capture_on

TP = {"tp": 2}
#: Communication alone costs, and no matmul is computed twice.
LINKS: dict[str, Any] = {"latency": 100.0}


def planned(graph: Graph, axes: dict[str, int], **options: Any) -> Plan:
    options = {"forbid_replicated_matmul": True, "cluster_info": {}, **options}
    return search(graph, mesh=MeshShape.from_dict(axes), cost_model=UnitCosts(axes, **LINKS), **options)


def linears(depth: int, width: int = 64) -> Graph:
    return capture_on(Linears(*[width] * (depth + 1), activation=True), 8, width)


@pytest.mark.parametrize("depth", [9, 16, 17])
def test_columns_and_rows_alternate_over_the_copies(depth: int) -> None:
    """Alike, every layer gathers or reduces; in pairs, every second one: the best there is, and proved to be."""
    graph = linears(depth)
    plan, unfolded = planned(graph, TP), planned(graph, TP, fold=False)
    assert plan.certificate.objective == pytest.approx(unfolded.certificate.objective, rel=1e-6)
    assert plan.certificate.bound <= unfolded.certificate.objective * (1 + 1e-9)
    assert plan.certificate.gap < 1e-3
    weights = [plan.states[f"layers.{layer}.weight"].placement for layer in range(4)]
    assert len({*weights[:2]}) == 2 and weights[:2] == weights[2:]
    (block,) = plan.blocks
    assert len(block.roots[0]) % 2 == 0
    costs, collectives = price(graph, plan, UnitCosts(TP, **LINKS))
    assert costs.total == pytest.approx(plan.certificate.objective, rel=1e-9)
    assert (collectives, costs.memory) == (plan.collectives, plan.costs.memory)


@pytest.mark.parametrize(
    "case", ["linears", "linears in little memory", "layers", "layers on two axes", "wide layers on two axes"]
)
def test_the_bound_is_of_all_plans_also_those_whose_copies_differ(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no longer blocks are tried, so that the best folded plan is worse than it."""
    axes = {"dp": 2, "tp": 2} if "two axes" in case else TP
    width, heads = (32, 4) if "wide" in case else (16, 2)
    graph = linears(5) if "linears" in case else capture_on(Stack(2, width, heads), 4, 8, width, requires_grad=True)
    options: dict[str, Any] = {}
    if "memory" in case:
        options["forbid_replicated_matmul"] = False
        options["memory_limit"] = 0.6 * sum(planned(graph, axes, **options).costs.memory.values())
    unfolded = planned(graph, axes, fold=False, **options).certificate
    monkeypatch.setattr("planner.sharding_ilp.folding.MAX_VARIABLES", 0)
    folded = planned(graph, axes, **options).certificate
    assert unfolded.status == "optimal"
    assert 0.75 * unfolded.objective <= folded.bound <= unfolded.objective * (1 + 1e-9)
    assert folded.objective >= unfolded.objective * (1 - 1e-6)


def test_without_longer_blocks_the_certificate_says_what_they_may_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = linears(16)
    best = planned(graph, TP).certificate
    monkeypatch.setattr("planner.sharding_ilp.folding.MAX_VARIABLES", 0)
    alike = planned(graph, TP).certificate
    assert alike.status == "optimal with alike copies"
    assert alike.objective > best.objective * 1.01
    assert alike.bound <= best.objective * (1 + 1e-9)
    assert alike.gap == pytest.approx(1 - alike.bound / alike.objective)


def test_a_pinned_plan_keeps_what_alternates() -> None:
    plan = planned(linears(16), TP)
    again = planned(capture_on(Linears(*[64] * 17, activation=True), 4, 64), TP, pinned=plan)
    assert {path: state.placement for path, state in again.states.items()} == {
        path: state.placement for path, state in plan.states.items()
    }


def test_grouped_copies_hand_on_what_their_last_one_does() -> None:
    (run,) = find_blocks(linears(9))
    pairs = grouped(run, 2)
    assert pairs is not None
    assert pairs.num_copies == run.num_copies // 2
    assert [name for copy in pairs.copies for name in copy] == [
        name for copy in run.copies[: 2 * pairs.num_copies] for name in copy
    ]
    assert [names[1] for names in pairs.carried] == list(pairs.carried_output)
    assert grouped(run, run.num_copies) is None


class Tower(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def test_a_plan_of_pairs_trains_as_one_device_does() -> None:
    torch.manual_seed(0)
    model, batch = Tower(6, 16).double(), (torch.randn(8, 16, dtype=torch.float64),)
    graph = planner.planning.capture_for_planning(model, example_inputs=batch)
    plan = plan_graph(graph, Cluster.parse("cpu-local:2"), mesh=MeshShape.from_dict(TP), forbid_replicated_matmul=True)
    assert [len(block.roots[0]) for block in plan.blocks] == [2]
    report = planner.verify(model, plan, batch=batch, steps=1)
    assert report.ok, report.table()
