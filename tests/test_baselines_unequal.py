"""Layouts of others on unequal devices: priced on the devices of their stages, in the order that is best for each."""

from __future__ import annotations

import dataclasses
import functools

import pytest

import planner
from cost_models import Cluster
from cost_models.cluster_format import IN_ORDER
from cost_models.unequal_devices import orders
from passes.plan import Plan
from planner.auditing.repriced_step import reprice
from planner.inspection.baseline_comparison import ComparedLayout, compare, comparison_table
from planner.inspection.plan_graph import graph_of_plan
from planner.whole_step.candidates.demands import Demands
from planner.whole_step.candidates.expert_layouts import BaselineSpace, Priced, best_of_baseline
from planner.whole_step.candidates.user_layout import read_layout
from tests.test_robustness_unequal import CALL, MODEL, fast_and_slow

pytestmark = pytest.mark.usefixtures("models_traced_once")


@functools.cache
def planned(**fix: int) -> Plan:
    return planner.plan(MODEL, fast_and_slow(), fix=fix, **CALL)


def compared(plan: Plan, names: tuple[str, ...] = (), layouts: tuple[str, ...] = ()) -> dict[str, ComparedLayout]:
    with graph_of_plan(plan, MODEL, **CALL) as graph:
        rows = compare(plan, graph, names, layouts=[read_layout(text) for text in layouts])
    return {row.name: row for row in rows}


def test_no_layout_of_others_is_faster_than_the_plan() -> None:
    plan = planned(tp=1, cp=1)
    rows = compared(plan, ("ddp", "uniform parameters"), ("pp=2 zero=0", "dp=2 zero=1"))
    seconds = {name: row.seconds for name, row in rows.items() if row.seconds is not None}
    assert len(seconds) == len(rows)
    assert plan.step.costs.simulated <= min(seconds.values()) * (1 + 1e-9)
    table = comparison_table(plan, tuple(rows.values()))
    assert max(map(len, table.splitlines())) <= 80 and "; on slow → fast" in " ".join(table.split())


def test_data_parallel_devices_wait_for_the_slowest() -> None:
    """Both have the same samples: it is as if both were slow, on the links that all have."""
    cluster = fast_and_slow()
    _, slow = cluster.groups
    alike = dataclasses.replace(cluster, groups=(dataclasses.replace(slow, count=2, levels=()),))
    ours = compared(planned(pp=2), layouts=("dp=2 zero=0",))["dp=2 zero=0"]
    theirs = compared(planner.plan(MODEL, alike, fix={"dp": 2}, **CALL), layouts=("dp=2 zero=0",))["dp=2 zero=0"]
    assert ours.seconds == pytest.approx(theirs.seconds, rel=1e-12) and ours.memory == theirs.memory


@pytest.mark.parametrize("name", ["uniform parameters", "megatron", "fsdp"])
def test_a_baseline_takes_what_its_plan_takes_when_priced_from_scratch(name: str) -> None:
    cluster, plan = fast_and_slow(), planned(pp=2)
    with graph_of_plan(plan, MODEL, **CALL) as graph:
        best = best_of_baseline(name, BaselineSpace(graph), cluster, Demands())
        assert isinstance(best, Priced)
        assert reprice(graph, best.plan(), cluster).seconds.total == pytest.approx(best.seconds, rel=1e-9)


def test_a_layout_has_the_better_of_both_orders() -> None:
    """Whichever of them the plan itself has."""
    possible = list(orders(fast_and_slow()))
    free, fixed = (
        [priced_on(cluster) for cluster in clusters] for clusters in (possible, [in_place(each) for each in possible])
    )
    assert len(set(fixed)) == 2 and free == [min(fixed)] * 2


def priced_on(cluster: Cluster) -> float | None:
    """Seconds of a pipeline of two stages beside a plan on ``cluster``."""
    plan = dataclasses.replace(planned(pp=2), cluster=cluster.to_dict())
    return compared(plan, layouts=("pp=2 zero=0 recompute=none m=1",))["pp=2 zero=0 recompute=none m=1"].seconds


def in_place(cluster: Cluster) -> Cluster:
    return dataclasses.replace(cluster, unequal=IN_ORDER)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("pp=2 v=2", "stages on unequal devices hold one chunk each"),
        ("pp=2 schedule=zbv", "schedule=zbv is for stages on equal devices"),
        ("pp=4", "pp 4 × dp 1 is 4 devices, the cluster has 2"),
    ],
)
def test_a_layout_that_has_no_price_there_says_why(layout: str, reason: str) -> None:
    row = compared(planned(pp=2), layouts=(layout,))[layout]
    assert row.seconds is None and reason in row.what
