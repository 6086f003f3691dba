"""By which factor figures of a cluster must be wrong before another plan wins: searched again on both sides of it."""

from __future__ import annotations

import dataclasses

import pytest

import planner
from cost_models import Cluster
from passes.ir.graph import Graph
from passes.plan import Plan
from planner.auditing.repriced_step import reprice
from planner.inspection.plan_graph import graph_of_plan
from planner.inspection.robustness import BEFORE, MARGIN, figures_of, robustness, robustness_table
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.costs.level_one import LevelOne
from planner.whole_step.costs.sharding import ShardingSpace
from planner.whole_step.costs.unit_costs import KeptSpace
from tests.small_models import Mlp
from tests.test_inspection import CALL, plan_of

CLUSTER = Cluster.uniform(4, flops=1e9, memory_bandwidth=1e9, latency=1e-6, bandwidth=1e8, memory_bytes=2**20)


def searched(graph: Graph, cluster: Cluster, plan: Plan) -> float:
    """Seconds of the best plan on a cluster, by the objective."""
    space = ShardingSpace.of(graph)
    level_one = LevelOne(cluster, space, KeptSpace.of(space, compiled=False))
    return Search(level_one, cluster, read_demands(headroom=plan.step.headroom)).run().solutions[0].seconds


def test_at_each_factor_another_plan_wins_and_not_before() -> None:
    model = Mlp(layers=4)
    plan = planner.plan(model, CLUSTER, **CALL)
    rows = robustness(plan, model=model, **CALL)
    factors = [row for row in rows if row.factor is not None]
    assert {row.figure for row in rows} == {figure.name for figure in figures_of(CLUSTER)} and factors
    figures = {figure.name: figure for figure in figures_of(CLUSTER)}
    with graph_of_plan(plan, model, **CALL) as graph:
        for row in factors:
            assert row.factor is not None and row.proved
            outward = 1.0 + BEFORE if row.larger else 1.0 - BEFORE
            before, behind = (figures[row.figure].at(CLUSTER, row.factor * step) for step in (1 / outward, outward))
            ours = [reprice(graph, plan, cluster).seconds.total for cluster in (before, behind)]
            best_before, best_behind = (searched(graph, cluster, plan) for cluster in (before, behind))
            assert best_before >= ours[0] * (1.0 - MARGIN)
            fits = max(rank.total for rank in plan.step.memory) <= behind.device.usable_bytes * (1 - plan.step.headroom)
            assert best_behind < ours[1] or not fits
    table = robustness_table(rows)
    assert "[1]" in table and max(map(len, table.splitlines())) <= 80


def test_the_plan_stops_to_fit_where_its_fullest_device_is_full() -> None:
    plan = plan_of("zero 3")
    used = max(rank.total for rank in plan.step.memory) / (1.0 - plan.step.headroom)
    cluster = Cluster.from_dict(dict(plan.cluster))
    group = cluster.groups[0]
    device = dataclasses.replace(group.device, memory_bytes=2 * used)
    tight = dataclasses.replace(cluster, groups=(dataclasses.replace(group, device=device),))
    rows = robustness(dataclasses.replace(plan, cluster=tight.to_dict()), model=Mlp(layers=4), **CALL)
    (row,) = (row for row in rows if row.figure == "memory of a device" and not row.larger)
    assert row.factor == pytest.approx(0.5, rel=1e-6)


def test_a_plan_on_a_mesh_has_no_rivals() -> None:
    with pytest.raises(ValueError, match="on a given mesh"):
        robustness(plan_of("mesh"), model=Mlp(layers=4), **CALL)
