"""What the closed form prunes or a search leaves out is a plan all the same if the simulator has it as faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
from transformers import LlamaConfig

import planner
from cost_models.schedules import SCHEDULES
from passes.plan import Plan
from planner.solvers.linear import EFFORT_LIMIT, OPTIMAL
from planner.whole_step.candidates.candidates import Candidate, is_offered
from planner.whole_step.judged_search import JudgedSearch
from planner.whole_step.judging import CLEARLY
from planner.whole_step.result.outcome import StepSolution
from planner.whole_step.result.plan_of_solution import Judged, judge, searched_if_open
from planner.whole_step.result.uniform_plans import versions
from planner.whole_step.search_entry import SearchEntry

pytestmark = pytest.mark.usefixtures("models_traced_once")

GIB = 2**30
V_SCHEDULES = ("zbv", "v_half")


def plan_of(num_layers: int, *, vocab_size: int, fix: dict[str, Any], num_devices: int, **options: Any) -> Plan:
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        vocab_size=vocab_size,
    )
    return planner.plan(config, "8x-rtx4090", num_devices=num_devices, fix=fix, **options)


def chunks_are_uneven(plan: Plan) -> bool:
    num_units = sum(group.count for chunk in plan.step.chunks for group in chunk.groups)
    num_chunks = len(plan.step.chunks)
    return not is_offered(
        plan.step.schedule, num_ranks=plan.step.axes["pp"], num_units=num_units, num_chunks=num_chunks
    )


#: Layers, samples and what is fixed: the best schedule is left out by a search, and pruned by what the closed form
#: promises of another mesh.
CASES = [(4, 3, {"pp": 2, "tp": 2}, True), (7, 12, {"cp": 1, "tp": 1}, False)]


@pytest.mark.parametrize("num_layers, batch, fix, is_left_out", CASES)
def test_no_schedule_that_is_fixed_gives_a_clearly_faster_plan(
    num_layers: int, batch: int, fix: dict, is_left_out: bool
) -> None:
    options: dict[str, Any] = {"vocab_size": 50_261, "num_devices": 4, "seq_len": 1024, "global_batch": batch}
    plan = plan_of(num_layers, fix=fix, **options)
    assert chunks_are_uneven(plan) == is_left_out
    for schedule in ("zb_h1", *V_SCHEDULES):
        other = plan_of(num_layers, fix={**fix, "pp": plan.step.axes["pp"], "schedule": schedule}, **options)
        assert other.step.costs.simulated >= plan.step.costs.simulated * (1.0 - CLEARLY)
        assert other.certificate.objective >= plan.certificate.bound
    assert plan.certificate.demands["fix"] == {name: [value] for name, value in fix.items()}


def test_the_layout_of_a_plan_is_tried_under_schedules_that_play_faster_than_they_are_priced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two chunks a rank, uneven by the vocabulary and by memory: the closed form holds them for slower than ZB-H1."""
    options: dict[str, Any] = {"global_batch": 128, "seq_len": 512}
    fix = {"pp": 8, "dp": 2, "num_microbatches": 16}
    searches = searches_of_candidates(monkeypatch)
    plan = planner.plan("llama-3-8b", "8x-rtx4090:2", fix=fix, **options)
    assert searches and all(len(numbers) == 1 for numbers in searches.values()), "a candidate is solved twice"
    other = planner.plan("llama-3-8b", "8x-rtx4090:2", fix={**fix, "schedule": "zb_h1"}, **options)
    assert plan.step.schedule in ("zbv", "dualpipev")
    assert plan.certificate.demands["fix"] == {name: [value] for name, value in fix.items()}
    assert plan.certificate.objective > other.certificate.objective
    assert plan.step.costs.simulated < other.step.costs.simulated * (1.0 - CLEARLY)
    alone = planner.plan("llama-3-8b", "8x-rtx4090:2", fix={**fix, "schedule": plan.step.schedule}, **options)
    assert plan.certificate.bound <= alone.certificate.bound


def searches_of_candidates(monkeypatch: pytest.MonkeyPatch) -> dict[Candidate, set[int]]:
    """By candidate, the numbers of the judged searches that solve its stages, filled as these run."""
    searches: dict[Candidate, set[int]] = {}
    numbers: dict[JudgedSearch, int] = {}
    solve = JudgedSearch._solve

    def recorded(search: JudgedSearch, entry: SearchEntry) -> Iterable[SearchEntry]:
        searches.setdefault(entry.candidate, set()).add(numbers.setdefault(search, len(numbers)))
        return solve(search, entry)

    monkeypatch.setattr(JudgedSearch, "_solve", recorded)
    return searches


def test_a_solution_is_judged_in_its_fastest_version(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[float] = []
    best_version = JudgedSearch._best_version

    def checked(search: JudgedSearch, solution: StepSolution) -> Judged:
        best = best_version(search, solution)
        all_versions = [solution, *versions(solution, search.demands)]
        assert best.report.seconds == min(judge(each).report.seconds for each in all_versions)
        judged.append(best.report.seconds / judge(solution).report.seconds)
        return best

    monkeypatch.setattr(JudgedSearch, "_best_version", checked)
    plan = plan_of(4, fix={"pp": 2, "tp": 2}, vocab_size=50_261, num_devices=4, seq_len=1024, global_batch=3)
    assert judged and chunks_are_uneven(plan)


def test_a_plan_says_whether_its_search_gave_up_what_might_be_faster() -> None:
    plan = plan_of(4, fix={"pp": 2, "tp": 2}, vocab_size=50_261, num_devices=4, seq_len=1024, global_batch=3)
    certificate = dataclasses.replace(plan.certificate, status=OPTIMAL, gap=0.05)
    plan = dataclasses.replace(plan, certificate=certificate)
    assert searched_if_open(plan, gap=0.01).certificate.status == "searched to the end"
    assert searched_if_open(plan, gap=0.01, gave_up=True).certificate.status == EFFORT_LIMIT
    assert searched_if_open(plan, gap=0.06, gave_up=True) is plan


def test_what_was_proved_next_best_is_still_told_of() -> None:
    options: dict[str, Any] = {"vocab_size": 50_261, "num_devices": 4, "seq_len": 1024, "global_batch": 3}
    plan = plan_of(4, fix={"pp": 2, "tp": 2}, num_alternatives=2, **options)
    others = plan_of(4, fix={"pp": 2, "tp": 2, "schedule": "zb_h1"}, **options)
    assert chunks_are_uneven(plan) and len(plan.step.alternatives) >= 2
    assert others.step.costs.simulated in [each.simulated for each in plan.step.alternatives]


def test_a_plan_where_no_other_schedule_fits() -> None:
    fix = {"pp": 3, "dp": 1, "tp": 1, "cp": 1, "recompute": "none"}
    limit = 2.2 * GIB
    options: dict[str, Any] = {"vocab_size": 32_000, "num_devices": 3, "seq_len": 4096, "global_batch": 12}
    with pytest.raises(ValueError, match="no plan fits in memory"):
        plan_of(7, fix={**fix, "schedule": tuple({*SCHEDULES} - {*V_SCHEDULES})}, memory_limit=limit, **options)
    plan = plan_of(7, fix=fix, memory_limit=limit, **options)
    assert plan.step.schedule in V_SCHEDULES and chunks_are_uneven(plan)
    assert max(rank.total for rank in plan.step.memory) <= limit
