"""Boxes of what ranks may hold have the optimum of an enumeration, and bound it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cost_models.step_time import step_memory, step_seconds
from planner.pipeline_ilp import content_boxes
from planner.pipeline_ilp.content_boxes import ContentBoxes
from planner.pipeline_ilp.fronts import LOAD
from planner.pipeline_ilp.rank_contents import contents_of_ranks
from planner.pipeline_ilp.segments import cut_segments
from planner.pipeline_ilp.stage_bounds import time_bounds
from planner.pipeline_ilp.stage_problem import Assignment, StageProblem, as_step, fits, folded, undominated
from tests.cells import cells
from tests.test_step_stages import Draw, brute_force

#: One chunk a rank, and no order that is played.
SCHEDULES = ("1f1b", "gpipe", "zb_h1")


def one_long_run(seed: int, schedule: str) -> StageProblem:
    """Five units at most, one long run and maybe an end on either side, on up to three ranks."""
    draw = Draw(seed)
    problem = draw.problem(schedule)
    ends = [replace(run, count=1) for run in problem.runs[:2]][: draw.random.randint(0, 2)]
    run = replace(problem.runs[-1], name="long", count=5 - len(ends))
    return replace(problem, runs=(*ends[:1], run, *ends[1:]))


class Offered:
    """The best of all that was offered, none of it beyond memory."""

    def __init__(self, problem: StageProblem, limit: float) -> None:
        self.problem, self.limit, self.best = problem, limit, math.inf

    def __call__(self, assignment: Assignment) -> None:
        step = as_step(self.problem, assignment)
        assert fits(self.problem, step_memory(step))
        assert sum(count for groups in assignment for _, _, count in groups) == self.problem.num_units
        self.best = min(self.best, step_seconds(step).total)

    def target(self) -> float:
        return self.limited() * (1.0 - 1e-6)

    def limited(self) -> float:
        return min(self.limit, self.best)


def bounded(problem: StageProblem, limit: float) -> tuple[float, float] | None:
    """The bound of the boxes over what beats a limit, and the best on the way; None if contents are not listed."""
    reduced, _ = undominated(folded(problem))
    contents = contents_of_ranks(reduced, time_bounds(reduced).load_within(limit))
    if contents is None:
        return None
    offered = Offered(reduced, limit)
    return ContentBoxes(reduced, contents).bound(offered, offered.target, offered.limited), offered.best


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_boxes_have_the_optimum_and_its_bound(schedule: str) -> None:
    tried = exact = 0
    for seed in cells(range(14), range(14, 40)):
        problem = one_long_run(seed, schedule)
        best = brute_force(problem)
        if math.isinf(best):
            continue
        above, below = bounded(problem, best * 1.1), bounded(problem, best * 0.999)
        if above is None or below is None:
            assert problem.num_microbatches == 1  # a load may be as long as the step
            continue
        assert above[0] <= best * (1 + 1e-9) <= above[1] * (1 + 2e-9)
        if problem.num_ranks > 1:  # what a single chunk reduces late is no content of a rank
            tried, exact = tried + 1, exact + (above[0] >= best * (1 - 1e-4) and above[1] <= best * (1 + 1e-9))
        assert below[1] > best * (1 - 1e-9)
    # of GPipe the boxes know no slowest forward and slowest backward: mostly they only bound it
    assert tried >= 8 and exact >= (0.0 if schedule == "gpipe" else 0.5) * tried


def test_boxes_that_run_out_bound_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [problem for seed in range(10) if math.isfinite(brute_force(problem := one_long_run(seed, "zb_h1")))]
    for most in (1, 2, 5):
        monkeypatch.setattr(content_boxes, "_MOST", most)
        for problem in problems:
            best = brute_force(problem)
            result = bounded(problem, best * 1.2)
            assert result is not None and result[0] <= best * (1 + 1e-9)


def test_contents_are_not_listed_where_they_are_too_many_or_hang_together_otherwise() -> None:
    problem = one_long_run(0, "1f1b")
    assert contents_of_ranks(folded(problem), math.inf) is None
    random_choices = [Draw(seed).choice(str(seed)) for seed in range(30)]
    many = replace(problem.runs[-1], count=200, choices=tuple(random_choices))
    assert contents_of_ranks(folded(replace(problem, runs=(many,))), 1e6) is None
    assert contents_of_ranks(folded(replace(problem, runs=(many, many))), 1e6) is None
    played = replace(problem, schedule="zbv", num_ranks=2, num_chunks=4, num_microbatches=4, memory=(math.inf,) * 2)
    assert contents_of_ranks(folded(played), 10.0) is None


def test_cuts_up_to_a_load_are_those_of_no_larger_load() -> None:
    tried = left_out = 0
    for seed in range(24):
        problem = folded(Draw(seed).problem("1f1b"))
        load = cut_segments(problem, LOAD, load_bound=0.0).load
        if math.isinf(load) or not any(map(math.isfinite, problem.memory)):
            continue
        tried += 1
        assert cut_segments(problem, LOAD, load_bound=0.0, most=load * 1.00001).load == pytest.approx(load, rel=1e-5)
        below = cut_segments(problem, LOAD, load_bound=0.0, most=load * 0.999).load
        assert below >= load * (1 - 1e-5)
        left_out += math.isinf(below)
    assert tried >= 6 and left_out >= 3
