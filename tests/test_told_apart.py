"""Plans that predictions do not tell apart: how near these are, how they are called, and the plainest of them."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

import planner
from cost_models import Cluster, told_apart
from cost_models.told_apart import OrderedPairs, are_told_apart, least_ordered, ordered_pairs
from passes.plan import Plan
from passes.plan.step_plan import Alternative
from planner.inspection.html_report.plan_tables import runner_up_rows
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.plainest import is_among, plainer_demands
from tests.small_models import Mlp
from tests.test_inspection import CALL, plan_of

pytestmark = pytest.mark.usefixtures("models_traced_once")

#: Two devices on which a pipeline is 3.5% faster than two replicas.
CLUSTER = Cluster.uniform(2, flops=1e9, memory_bandwidth=1e10, latency=1e-6, bandwidth=1.25e8, memory_bytes=2**21)


def test_pairs_two_percent_apart_are_rightly_ordered_nine_times_of_ten() -> None:
    assert [row.apart for row in ordered_pairs()] == sorted(row.apart for row in ordered_pairs())
    assert told_apart.told_apart() == 0.02
    assert are_told_apart(1.0, 1.02) and are_told_apart(1.02, 1.0) and not are_told_apart(1.0, 1.019)


def test_the_nearest_pairs_that_are_mostly_right_say_what_is_told_apart() -> None:
    rows = [OrderedPairs(0.0, 8, 10), OrderedPairs(0.02, 0, 0), OrderedPairs(0.05, 9, 10), OrderedPairs(0.1, 1, 10)]
    assert least_ordered(rows) == 0.05


def with_runner_up(plan: Plan, factor: float) -> Plan:
    seconds = plan.step.costs.simulated * factor
    return dataclasses.replace(
        plan, step=dataclasses.replace(plan.step, alternatives=(Alternative("another", seconds, seconds, 1e9),))
    )


@pytest.mark.parametrize(
    ("factor", "told"),
    [
        (1.019, "next best, +1.90% (not told apart)"),
        (1.021, "next best, +2.10%:"),
        (0.99, "faster, -1.00% (not told apart)"),
    ],
)
def test_runners_up_say_whether_predictions_tell_them_apart(factor: float, told: str) -> None:
    plan = with_runner_up(plan_of("zero 3"), factor)
    assert told in plan.brief()
    near = "(not told apart)" in told
    assert ("(not told apart)" in plan.summary()) == near
    assert ("(not told apart)" in runner_up_rows(plan)[0][2]) == near


def axes_of(fixed: dict[str, frozenset[int]]) -> str:
    return " ".join(axis for axis in ("tp", "ep", "cp", "pp") if fixed.get(axis) != {1})


def test_plainer_demands_allow_ever_more() -> None:
    demands = list(plainer_demands(read_demands(None, None)))
    axes = [axes_of(dict(each.fixed)) for each in demands]
    assert [name for name, _ in itertools.groupby(axes)][:7] == ["", "tp", "ep", "cp", "pp", "tp ep", "tp cp"]
    pipelines = [each.fixed.get("schedule") for each, name in zip(demands, axes) if name == "pp"]
    assert pipelines == [{"1f1b"}, {"1f1b", "interleaved_1f1b"}, None]
    assert not demands[-1].fixed


def test_plainer_demands_are_within_what_is_asked_for() -> None:
    demands = list(plainer_demands(read_demands({"tp": 2, "schedule": "zbv"}, {"pp": 1})))
    assert [axes_of(dict(each.fixed)) for each in demands] == ["tp pp", "tp ep pp", "tp cp pp", "tp ep cp pp"]
    assert all(each.fixed["schedule"] == {"zbv"} and each.fixed["tp"] == {2} for each in demands)


def test_a_plan_is_among_demands_that_allow_its_axes_and_schedule() -> None:
    step = planner.plan(Mlp(layers=4), CLUSTER, fix={"pp": 2, "schedule": "1f1b"}, **CALL).step
    assert is_among(step, {}) and is_among(step, {"tp": frozenset({1}), "schedule": frozenset({"1f1b", "zbv"})})
    assert not is_among(step, {"pp": frozenset({1})}) and not is_among(step, {"schedule": frozenset({"zbv"})})


def test_the_plainest_plan_is_the_fastest_if_nothing_plainer_is_near() -> None:
    fastest, plainest = (planner.plan(Mlp(layers=4), CLUSTER, objective=name, **CALL) for name in ("time", "plainest"))
    assert fastest.step.axes["pp"] == 2
    assert plainest == fastest


def test_the_plainest_plan_is_near_the_fastest_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest = planner.plan(Mlp(layers=4), CLUSTER, **CALL)
    monkeypatch.setattr(told_apart, "told_apart", lambda: 0.05)
    plan = planner.plan(Mlp(layers=4), CLUSTER, objective="plainest", **CALL)
    assert plan.step.axes["dp"] == 2
    assert 1.0 < plan.step.costs.simulated / fastest.step.costs.simulated < 1.05
    first = plan.step.alternatives[0]
    assert (first.simulated, first.seconds) == (fastest.step.costs.simulated, fastest.certificate.objective)
    assert "zb_h2" in first.what and any("the plainest plan" in note and "-3.3" in note for note in plan.notes)
    assert plan.certificate.demands["fix"]["pp"] == [1]
    assert Plan.from_dict(json.loads(plan.to_json())) == plan


def test_the_plainest_plan_keeps_what_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_apart, "told_apart", lambda: 10.0)
    plan = planner.plan(Mlp(layers=4), CLUSTER, objective="plainest", fix={"dp": 1}, **CALL)
    assert plan.step.axes["tp"] == 2
