"""By which factor figures of a cluster must be wrong before another plan wins: searched again on both sides of it."""

from __future__ import annotations

import dataclasses

import pytest

import planner
from benchmarks.break_evens import faults
from cost_models import Cluster
from planner.inspection.plan_graph import graph_of_plan
from planner.inspection.robustness import BEFORE, LARGEST, figures_of, least_memory, robustness, robustness_table
from tests.small_models import Mlp
from tests.test_inspection import CALL, plan_of

pytestmark = pytest.mark.usefixtures("models_traced_once")

CLUSTER = Cluster.uniform(2, flops=1e9, memory_bandwidth=1e9, latency=1e-6, bandwidth=1e8, memory_bytes=2**20)


def test_at_each_factor_another_plan_wins_and_not_before() -> None:
    model = Mlp(layers=4)
    plan = planner.plan(model, CLUSTER, **CALL)
    rows = robustness(plan, model=model, **CALL)
    factors = [row for row in rows if row.factor is not None]
    assert {row.figure for row in rows} == {figure.name for figure in figures_of(CLUSTER)} and factors
    assert all(row.proved for row in factors)
    with graph_of_plan(plan, model, **CALL) as graph:
        assert [fault for row in factors for fault in faults(graph, plan, row)] == []
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


@pytest.mark.parametrize("least", [1.0, 1.01, 1.5, 2.3, 3.99])
def test_of_many_plans_that_each_take_a_little_less_memory_the_leanest_is_named(least: float) -> None:
    def winner_at(factor: float) -> tuple[float | None, bool]:
        return (max(least, 0.999 * factor) if factor >= least else None), True

    factor, memory, proved = least_memory(winner_at, lambda memory: memory)
    assert proved and factor == memory and factor is not None and least <= factor <= (1 + BEFORE) * least


def test_where_no_plan_takes_more_memory_no_factor_is_named() -> None:
    assert least_memory(lambda factor: (None, factor < LARGEST), float) == (None, None, False)
