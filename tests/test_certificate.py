"""What a plan says of its bound and gap is true where the search stops early, against trying everything."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from planner.pipeline_ilp.stage_ilp import solve_stages
from planner.pipeline_ilp.stage_proofs import Proofs
from planner.planning import plan_graph
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.costs.level_one import LevelOne
from planner.whole_step.plan_step import plan_step
from planner.whole_step.result.outcome import Outcome
from tests.exhaustive import fastest_of_all
from tests.exhaustive_models import CLUSTERS, space
from tests.test_step_stages import Draw, brute_force

#: Pipelines of two blocks on eight devices, which takes a second to try.
FEW = {"pp": 2, "recompute": ("none", "full"), "zero": (0, 3)}


@cache
def level_one(model: str, cluster: str) -> LevelOne:
    """Of these tests alone: searches of others may have found further shardings."""
    return LevelOne(CLUSTERS[cluster](), *space(model))


def stopped_at(gap: float) -> tuple[Search, Outcome]:
    model = level_one("2-block mlp", "eight")
    search = Search(model, model.cluster, read_demands(FEW, gap=gap, time_limit=600.0))
    return search, search.run()


@cache
def optimum() -> float:
    return fastest_of_all(stopped_at(0.0)[0]).seconds


@pytest.mark.parametrize("gap", [0.05, 0.2, 0.5])
def test_the_bound_of_a_search_with_a_gap_is_no_more_than_the_optimum(gap: float) -> None:
    _, outcome = stopped_at(gap)
    best = outcome.solutions[0].seconds
    assert outcome.bound <= optimum() * (1 + 1e-9) and optimum() <= best * (1 + 1e-9)
    assert outcome.gap == pytest.approx((best - outcome.bound) / best, abs=1e-12)
    assert outcome.gap <= gap


def test_some_search_with_a_gap_stops_above_its_bound() -> None:
    assert max(stopped_at(gap)[1].gap for gap in (0.05, 0.2, 0.5)) > 0.01


def test_pruned_candidates_count_in_the_bound() -> None:
    search, _ = stopped_at(0.0)
    outcome = Search(search.level_one, search.cluster, search.demands)
    first = next(outcome._first_entries())
    outcome.left.append(replace(first, bound=0.5 * optimum()))  # as if a candidate of such a bound had been pruned
    assert outcome.run().bound == pytest.approx(0.5 * optimum())


def test_candidates_that_the_gap_leaves_open_count_in_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    search, outcome = stopped_at(0.5)
    cutoff = 0.5 * outcome.solutions[0].seconds
    least = (cutoff + outcome.bound) / 2  # not looked at, and less than all else that was not
    again = Search(search.level_one, search.cluster, search.demands)
    first, *others = again._first_entries()
    monkeypatch.setattr(again, "_first_entries", lambda: iter([replace(first, bound=least), *others]))
    assert cutoff < again.run().bound <= least


def test_a_plan_states_the_gap_of_its_objective_and_bound() -> None:
    model = level_one("2-block mlp", "eight")
    certificate = plan_step(model.space.graph, model.cluster, read_demands(FEW, gap=0.5, time_limit=600.0)).certificate
    assert certificate.bound <= optimum() * (1 + 1e-9) and optimum() <= certificate.objective * (1 + 1e-9)
    assert certificate.gap == pytest.approx(1.0 - certificate.bound / certificate.objective, abs=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved_1f1b"])
def test_stages_given_up_early_are_bounded_by_what_enumeration_finds(schedule: str) -> None:
    gaps = []
    for seed in range(12):
        problem = Draw(seed).problem(schedule)
        solved, best = solve_stages(problem, gap=0.5, effort=0.0), brute_force(problem)
        if solved is None or solved.assignment is None:
            continue
        assert solved.bound <= best * (1 + 1e-9) and best <= solved.objective * (1 + 1e-9)
        assert solved.gap == pytest.approx((solved.objective - solved.bound) / solved.objective, abs=1e-12)
        gaps.append(solved.gap)
    assert max(gaps) > 0.01


def test_a_mesh_plan_that_time_stops_states_its_gap() -> None:
    from passes.ir.types import MeshShape

    model = level_one("6-block mlp", "eight")
    mesh = MeshShape.parse("dp=2,tp=4")
    best = plan_graph(model.space.graph, model.cluster, mesh=mesh).certificate
    stopped = plan_graph(model.space.graph, model.cluster, mesh=mesh, time_limit=0.0).certificate
    assert stopped.bound <= best.objective * (1 + 1e-9) <= stopped.objective * (1 + 2e-9)
    assert stopped.gap == pytest.approx(1.0 - stopped.bound / stopped.objective, abs=1e-12)
    assert (stopped.status, best.status) == ("stopped by time limit", "optimal with alike copies")


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved_1f1b", "zbv"])
def test_a_problem_that_is_asked_for_again_goes_on_from_what_is_proved(schedule: str) -> None:
    """Below the optimum, above it and without a cutoff, in any order: as solved from scratch each time."""
    again = 0
    for seed in range(8):
        problem, proofs = Draw(seed).problem(schedule), Proofs()
        best = brute_force(problem)
        for share in (0.9, 1.2, 0.99, 1.01) if best < float("inf") else ():
            solved = solve_stages(problem, cutoff=share * best, gap=1e-7, proofs=proofs)
            assert solved is not None and (solved.assignment is not None) == (share > 1.0)
            assert proofs.bound <= best * (1 + 1e-9)
            if share > 1.0:
                assert solved.objective == pytest.approx(best, rel=1e-6)
                again += 1
        last = solve_stages(problem, gap=1e-7, proofs=proofs)
        assert (last is None) == (best == float("inf"))
        assert last is None or last.objective == pytest.approx(best, rel=1e-6)
    assert again >= 6


@pytest.mark.parametrize("first_gap, gap", [(0.5, 0.05), (0.2, 0.0), (0.05, 0.0)])
def test_a_search_that_goes_on_from_another_with_a_larger_gap_proves_its_own(first_gap: float, gap: float) -> None:
    search, before = stopped_at(first_gap)
    closer = Search(search.level_one, search.cluster, replace(search.demands, gap=gap))
    closer.go_on_from(search)
    outcome = closer.run()
    best = outcome.solutions[0].seconds
    assert best <= before.solutions[0].seconds * (1 + 1e-9) and outcome.bound >= before.bound * (1 - 1e-9)
    assert outcome.bound <= optimum() * (1 + 1e-9) and optimum() <= best * (1 + 1e-9)
    assert outcome.gap <= gap + 1e-9
    others = Search(search.level_one, search.cluster, replace(search.demands, left_out=True))
    others.go_on_from(search)
    assert others.earlier is None and not others.solutions and others.bounds is search.bounds


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
def test_a_cutoff_leaves_what_beats_it_and_nothing_else(schedule: str) -> None:
    """Of problems that are asked for once, which are proved up to the cutoff alone."""
    tried = 0
    for seed in range(12):
        problem = Draw(seed).problem(schedule)
        best = brute_force(problem)
        if best == float("inf"):
            continue
        above, below = (solve_stages(problem, gap=1e-7, cutoff=best * share) for share in (1.001, 0.999))
        assert above is not None and above.objective == pytest.approx(best, rel=1e-6)
        assert above.bound <= best * (1 + 1e-9)
        assert below is not None and below.assignment is None and below.bound <= best * (1 + 1e-9)
        tried += 1
    assert tried >= 6
