"""What a solver proves of some assignments raises no bound of all; branching that ends early bounds all the same."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from planner.pipeline_ilp import whole_shares
from planner.pipeline_ilp.stage_ilp import solve_stages
from planner.pipeline_ilp.stage_problem import folded, undominated
from planner.pipeline_ilp.stage_program import StageProgram
from planner.pipeline_ilp.stage_proofs import Proofs
from planner.pipeline_ilp.stage_search import NOTHING_FOUND, StageSearch, StageSolution
from planner.solvers.linear import EFFORT_LIMIT, OPTIMAL, LinearSolution
from planner.whole_step import best_first
from planner.whole_step.best_first import STAGE_EFFORT, Search
from planner.whole_step.candidates.candidates import Candidate
from planner.whole_step.candidates.demands import Demands
from planner.whole_step.candidates.mesh_layout import MeshLayout
from planner.whole_step.judged_search import JudgedSearch
from planner.whole_step.result.candidate_fates import CandidateFates
from planner.whole_step.search_entry import SearchEntry
from tests.cells import cells
from tests.test_content_boxes import one_long_run
from tests.test_step_stages import Draw, brute_force

CUTOFF = 1000.0


def raised(*, bound: float, within: float, is_relaxed: bool, status: str = OPTIMAL, infeasible: bool = False) -> float:
    """The bound that is kept for other cutoffs, once a solver has proved ``bound`` with rows for steps ``within``."""
    problem, _ = undominated(folded(Draw(0).problem("1f1b")))
    proofs = Proofs(within=within)
    search = StageSearch(problem, CUTOFF, 0.0, proofs)
    stage = StageProgram(problem, second=1.0)
    solution = LinearSolution(None, bound, status, "a solver", infeasible=infeasible)
    search.raise_bound(stage, solution, is_relaxed=is_relaxed)
    assert search.bound >= proofs.bound
    return proofs.bound


def test_beyond_the_limit_only_a_relaxation_of_all_assignments_bounds_them() -> None:
    beyond = 2 * CUTOFF
    assert raised(bound=beyond, within=math.inf, is_relaxed=True) == beyond
    assert raised(bound=beyond, within=CUTOFF, is_relaxed=True) == CUTOFF
    assert raised(bound=beyond, within=math.inf, is_relaxed=False) == CUTOFF
    assert raised(bound=beyond, within=math.inf, is_relaxed=True, infeasible=True) == CUTOFF


def test_a_stopped_relaxation_bounds_nothing() -> None:
    below = CUTOFF / 2
    assert raised(bound=below, within=math.inf, is_relaxed=True, status=EFFORT_LIMIT) == 0.0
    assert raised(bound=below, within=CUTOFF, is_relaxed=True, status=EFFORT_LIMIT) == 0.0
    assert raised(bound=below, within=math.inf, is_relaxed=False, status=EFFORT_LIMIT) == below
    assert raised(bound=below, within=CUTOFF, is_relaxed=True) == below


@pytest.mark.parametrize("most_nodes", [1, 2, 3])
def test_branching_over_shares_that_ends_early_is_no_bound_too_high(
    most_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_shares, "_MOST_NODES", most_nodes)
    num_bounded = 0
    for seed in cells(range(10), range(10, 24)):
        problem = one_long_run(seed, "zbv")
        best = brute_force(problem)
        if math.isfinite(best):
            solution = solve_stages(problem, effort=0.0, cutoff=best * 1.05)
            assert solution is not None and solution.bound <= best * (1 + 1e-9)
            num_bounded += 1
    assert num_bounded >= 3


def test_branching_over_shares_ends_once_what_is_open_cannot_be_closed() -> None:
    """Where every half of a node stays open, at half the nodes: each that is open would take two more at least."""
    branching = whole_shares._ShareBranching.__new__(whole_shares._ShareBranching)
    stage = SimpleNamespace(share_rows=[0], program=SimpleNamespace(row_lowers=[0.0], row_uppers=[9.0]))
    vars(branching).update(stage=stage, target=1.0, stopped=False, num_nodes=0)

    def bounded(rows: dict[int, tuple[float, float]]) -> whole_shares._Node | None:
        branching.num_nodes += 1
        assert branching.num_nodes <= whole_shares._MOST_NODES
        guess = rows == {0: (5.0, 5.0)}
        order = branching.num_nodes
        return None if guess else whole_shares._Node(order / 1000.0, order, rows, (0, 0.5))

    branching._bounded = bounded  # type: ignore[method-assign]
    bound = branching.bound(SimpleNamespace(units=[5]))  # type: ignore[arg-type]
    assert branching.num_nodes == pytest.approx(whole_shares._MOST_NODES / 2, abs=4) and not branching.stopped
    assert 0.0 < bound < branching.num_nodes / 1000.0  # the least of those that are open


def judged(**attributes: Any) -> JudgedSearch:
    search = JudgedSearch.__new__(JudgedSearch)
    vars(search).update(attributes)
    return search


def test_a_judged_search_spends_more_effort_only_where_that_may_prove_more() -> None:
    search = judged(solutions=[], proved=2.0)
    assert search._is_worth_more(1.9) and not search._is_worth_more(2.0)
    assert judged(solutions=[object()], proved=2.0)._is_worth_more(2.1)


def test_a_candidate_whose_bound_hardly_rises_is_not_solved_with_more_effort_again() -> None:
    candidate = Candidate(MeshLayout(2, 1, 1, 1), local_batch=1, num_microbatches=4, schedule="zbv", chunks_per_rank=2)
    first, second = (SearchEntry(1.0, 0, candidate, effort=effort) for effort in (0.0, 2.0))
    assert second.is_stuck(1.009, cutoff=1.1) and not second.is_stuck(1.011, cutoff=1.1)
    assert not first.is_stuck(1.0, cutoff=1.1)


def test_a_later_search_tries_what_is_stuck_once_as_hard(monkeypatch: pytest.MonkeyPatch) -> None:
    unsolved = StageSolution(None, math.inf, 1.0, NOTHING_FOUND)
    monkeypatch.setattr(best_first, "solve_stages", lambda problem, **options: unsolved)
    search = Search.__new__(Search)
    vars(search).update(fates=CandidateFates(), demands=Demands(), left=[], solutions=[], diving=False)
    vars(search).update(stage_programs=0.0, deadline=math.inf, order=itertools.count())
    candidate = Candidate(MeshLayout(2, 1, 1, 1), local_batch=1, num_microbatches=4, schedule="zbv", chunks_per_rank=2)
    entry: Any = SearchEntry(1.0, 0, candidate, sharded=cast(Any, object()), problem=cast(Any, object()))
    (harder,) = search._solve(entry)
    assert harder.effort == 2 * STAGE_EFFORT and list(search._solve(harder)) == []
    (stuck,) = search.left
    assert stuck.effort == harder.effort


def test_what_is_stuck_is_tried_again_where_half_as_much_is_left_to_prove() -> None:
    candidate = Candidate(MeshLayout(2, 1, 1, 1), local_batch=1, num_microbatches=4, schedule="zbv", chunks_per_rank=2)
    entry = SearchEntry(1.0, 0, candidate)
    stuck = entry.given_up(1.01, effort=2.0, cutoff=1.11)
    assert [stuck.is_worth_trying(cutoff) for cutoff in (1.2, 1.11, 1.07, 1.05, 1.01)] == [False] * 3 + [True, False]
    done = entry.given_up(1.01, effort=0.0, cutoff=1.11)
    assert done.is_worth_trying(1.2) and done.is_worth_trying(math.inf) and not done.is_worth_trying(1.0)


def test_a_search_that_the_simulator_judges_tries_again_what_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "share_prices", lambda search, other: None)
    candidate = Candidate(MeshLayout(2, 1, 1, 1), local_batch=1, num_microbatches=4, schedule="zbv", chunks_per_rank=2)
    stuck = SearchEntry(1.0, 0, candidate).given_up(1.01, effort=2.0, cutoff=1.11)
    search, after, closer = judged(), judged(), Search.__new__(Search)
    for each in (search, after, closer):
        vars(each).update(fates=CandidateFates(), demands=Demands(), left=[stuck], solutions=[], finished=set())
        vars(each).update(shortfalls={})
    after.go_on_from(search)
    closer.go_on_from(search)
    assert [[each.is_worth_trying(1.11) for each in searched.earlier or ()] for searched in (after, closer)] == [
        [True],
        [False],
    ]


def test_candidates_of_nearly_one_bound_are_solved_before_one_is_to_be_beaten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "_advance", lambda search, entry: [])
    monkeypatch.setattr(Search, "_solve", lambda search, entry: [])
    search = judged(limit=10.0, next_limit=9.0, tied=-math.inf, tried=set())

    def entry(bound: float, effort: float = 0.0) -> Any:
        return SimpleNamespace(bound=bound, effort=effort, candidate=None, weight=0.0)

    search._solve(entry(5.0))
    search._advance(entry(5.01))
    assert search.limit == 10.0
    search._advance(entry(5.1))
    assert search.limit == 9.0
    search.next_limit = 8.0
    search._solve(entry(5.0, effort=1.0))
    search._advance(entry(5.0))
    assert search.limit == 8.0
