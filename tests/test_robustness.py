"""By which factor figures of a cluster must be wrong before another plan wins: searched again on both sides of it."""

from __future__ import annotations

import dataclasses
import math

import pytest

import planner
from benchmarks.break_evens import faults
from cost_models import Cluster
from planner.auditing.repriced_step import reprice
from planner.inspection.cluster_figures import figures_of
from planner.inspection.nearest_lead import MAX_SEARCHES, nearest_lead
from planner.inspection.plan_graph import graph_of_plan
from planner.inspection.robustness import (
    LARGEST,
    MARGIN,
    BreakEven,
    gap_of,
    least_seconds,
    robustness,
    robustness_table,
)
from tests.small_models import Mlp
from tests.test_inspection import CALL, plan_of

pytestmark = pytest.mark.usefixtures("models_traced_once")

CLUSTER = Cluster.uniform(2, flops=1e9, memory_bandwidth=1e10, latency=1e-6, bandwidth=1e8, memory_bytes=2**20)


def test_at_each_factor_another_plan_wins_and_not_before() -> None:
    model = Mlp(layers=4)
    plan = planner.plan(model, CLUSTER, **CALL)
    rows = robustness(plan, model=model, **CALL)
    factors = [row for row in rows if row.factor is not None]
    assert {row.figure for row in rows} == {figure.name for figure in figures_of(CLUSTER)} and factors
    assert all(row.proved for row in rows)
    with graph_of_plan(plan, model, **CALL) as graph:
        assert [fault for row in factors for fault in faults(graph, plan, row)] == []
    table = robustness_table(rows)
    assert "[1]" in table and max(map(len, table.splitlines())) <= 80


def test_a_plan_that_plays_faster_than_its_objective_is_held_to_what_it_plays() -> None:
    plan = planner.plan(Mlp(layers=4), CLUSTER, fix={"pp": 2, "schedule": "zb_h2"}, **CALL)
    objective, simulated = plan.certificate.objective, plan.step.costs.simulated
    assert simulated < 0.99 * objective
    assert gap_of(plan) == pytest.approx(max(0.0, 1.0 - plan.certificate.bound / simulated))
    with graph_of_plan(plan, Mlp(layers=4), **CALL) as graph:
        assert least_seconds(reprice(graph, plan, CLUSTER)) == pytest.approx(simulated)


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


#: How far before a lead searches must find nothing.
NEAR = 0.02
FAR = math.log(LARGEST)


class Searches:
    """Searches among plans that lead from a distance to another, each told apart by its name."""

    def __init__(self, leads: dict[str, tuple[float, float]]) -> None:
        self.leads, self.number = leads, 0

    def search(self, distance: float) -> str | None:
        """The plan that leads at a distance and reaches farthest: the worst answer for finding the nearest."""
        self.number += 1
        leading = [name for name, (begin, end) in self.leads.items() if begin <= distance <= end]
        return max(leading, key=lambda name: self.leads[name], default=None)

    def begin(self, name: str, near: float, far: float) -> float:
        return max(near, min(self.leads[name][0], far))


def found(searches: Searches, **options: bool) -> tuple[float | None, str | None, bool]:
    lead = nearest_lead(searches.search, searches.begin, farthest=FAR, tolerance=NEAR, **options)
    assert searches.number <= MAX_SEARCHES
    return lead.distance, lead.winner, lead.ended


def test_a_plan_that_leads_from_half_way_on_takes_a_search_far_one_before_and_one_half_way() -> None:
    searches = Searches({"a": (0.7, FAR)})
    assert found(searches) == (0.7, "a", True) and searches.number == 3


def test_a_nearer_plan_is_found_just_before_the_farther_ones_lead() -> None:
    assert found(Searches({"a": (0.7, FAR), "b": (0.5, 0.69), "c": (0.3, 0.49)})) == (0.3, "c", True)


def test_a_plan_that_leads_in_the_middle_alone_is_found() -> None:
    assert found(Searches({"island": (0.6, 0.8)})) == (0.6, "island", True)
    assert found(Searches({"far": (1.2, FAR), "island": (0.55, 0.65)})) == (0.55, "island", True)


@pytest.mark.parametrize("least", [0.0, 0.01, 0.4, 0.83, FAR - 0.001])
@pytest.mark.parametrize("leads_on", [False, True])
def test_of_many_plans_that_each_lead_a_little_earlier_the_nearest_is_found(least: float, leads_on: bool) -> None:
    leads = {f"{number}": (least + (FAR - least) * number / 2000, FAR) for number in range(2000)}
    distance, _, ended = found(Searches(leads), leads_on=leads_on)
    assert ended and distance is not None and least <= distance <= least + NEAR * 1.001


def test_where_nothing_leads_the_farthest_and_half_way_are_searched() -> None:
    searches = Searches({})
    assert found(searches) == (None, None, True) and searches.number == 2


def test_searches_that_do_not_end_are_stopped_and_said() -> None:
    lead = nearest_lead(lambda distance: "new", lambda _, near, far: far, farthest=FAR, tolerance=1e-6)
    assert lead.winner == "new" and not lead.ended and lead.searches == MAX_SEARCHES


def test_a_table_says_how_far_searches_have_proved() -> None:
    rows = (BreakEven("bandwidth of pcie", True, 1.5, "dp=8"), BreakEven("arithmetic", False, None, proved_to=0.031))
    text = robustness_table(rows)
    assert "none up to × 0.25 *" in text and "faster by up to 3.1%" in text and "× 1.5 [1]\n" in text
    assert "*" not in robustness_table(rows[:1]) and rows[0].proved_to == MARGIN
