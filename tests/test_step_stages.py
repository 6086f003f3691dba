"""The stage program equals exhaustive enumeration on small problems."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from cost_models.schedules import SCHEDULES, reason_not
from cost_models.step import LayerCosts
from cost_models.step_time import layer_sum, step_memory, step_seconds
from planner.pipeline_ilp.fronts import Front
from planner.pipeline_ilp.posed_problem import quick_bound
from planner.pipeline_ilp.ranks import main_run
from planner.pipeline_ilp.rounds import longest_chunk
from planner.pipeline_ilp.stage_bounds import lower_bound, memory_shortfall
from planner.pipeline_ilp.stage_ilp import bound_within_memory, solve_stages
from planner.pipeline_ilp.stage_problem import (
    Assignment,
    StageProblem,
    UnitChoice,
    UnitRun,
    as_step,
    fits,
    folded,
)
from planner.pipeline_ilp.stage_search import CUTOFF
from tests.cells import cells


def every_assignment(problem: StageProblem) -> Iterator[Assignment]:
    """All cuts, all choices of every single unit."""
    units = [index for index, run in enumerate(problem.runs) for _ in range(run.count)]
    for choices in itertools.product(*(range(len(problem.runs[unit].choices)) for unit in units)):
        for cuts in itertools.combinations(range(1, len(units)), problem.num_chunks - 1):
            yield tuple(
                tuple((units[place], choices[place], 1) for place in range(begin, end))
                for begin, end in itertools.pairwise([0, *cuts, len(units)])
            )


def brute_force(problem: StageProblem) -> float:
    """Seconds of the best assignment, infinite if none fits."""
    best = math.inf
    for assignment in every_assignment(problem):
        step = as_step(problem, assignment)
        if fits(problem, step_memory(step)):
            best = min(best, step_seconds(step).total)
    return best


class Draw:
    """A random small problem: uneven ends, every figure, memory tight or loose."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def maybe(self, most: float) -> float:
        return self.random.choice([0.0, self.random.uniform(0, most)])

    def choice(self, name: str) -> UnitChoice:
        backward = self.random.uniform(0.5, 3)
        costs = LayerCosts(
            forward=self.random.uniform(0.2, 2),
            backward=backward,
            backward_weight=self.random.uniform(0, backward),
            gather_forward=self.maybe(2),
            gather_backward=self.maybe(2),
            reduce_backward=self.maybe(2),
            reduce_step=self.maybe(4),
            update_step=self.maybe(1),
            gather_step=self.maybe(1),
            state_bytes=self.random.uniform(0, 5),
            saved_bytes=self.random.uniform(0, 5),
            peak_bytes=self.maybe(9),
        )
        return UnitChoice(label=(name,), costs=costs)

    def shape(self, schedule: str) -> tuple[int, int, int]:
        while True:
            ranks, microbatches = self.random.choice([1, 2, 2, 3, 4]), self.random.choice([1, 2, 4, 6, 8])
            chunks = ranks * (SCHEDULES[schedule].chunks_per_rank or 2)
            runs = reason_not(schedule, num_ranks=ranks, num_microbatches=microbatches, num_chunks=chunks) is None
            if chunks <= 4 and runs:
                return ranks, chunks, microbatches

    def problem(self, schedule: str) -> StageProblem:
        ranks, chunks, microbatches = self.shape(schedule)
        counts = [1] * self.random.randint(1, 3)
        num_units = self.random.randint(max(2, chunks), 5)
        while sum(counts) < num_units:
            counts[self.random.randrange(len(counts))] += 1
        same = (self.maybe(1), self.maybe(1)) if self.random.random() < 0.5 else None
        runs = tuple(
            UnitRun(
                name=f"run{index}",
                count=count,
                choices=tuple(self.choice(str(choice)) for choice in range(self.random.randint(1, 3))),
                receive_forward=same[0] if same else self.maybe(1),
                receive_backward=same[1] if same else self.maybe(1),
            )
            for index, count in enumerate(counts)
        )
        tight = self.random.uniform(4, 16) * num_units / ranks + self.random.uniform(0, 10)
        return StageProblem(
            runs=runs,
            schedule=schedule,
            num_ranks=ranks,
            num_chunks=chunks,
            num_microbatches=microbatches,
            memory=(self.random.choice([math.inf, tight, tight]),) * ranks,
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equals_exhaustive_enumeration(schedule: str) -> None:
    feasible = 0
    for seed in cells(range(12), range(12, 24)):
        problem = Draw(seed).problem(schedule)
        best = brute_force(problem)
        solution = solve_stages(problem, gap=1e-7)
        if math.isinf(best):
            assert solution is None
            continue
        feasible += 1
        assert solution is not None and solution.assignment is not None
        step = as_step(problem, solution.assignment)
        assert fits(problem, step_memory(step))
        assert solution.objective == pytest.approx(step_seconds(step).total, rel=1e-12)
        assert solution.objective == pytest.approx(best, rel=1e-6)
        assert best * (1 - 1e-5) <= solution.bound <= best * (1 + 1e-9)
        for bound in (lower_bound, quick_bound, bound_within_memory):
            assert bound(problem) <= best * (1 + 1e-9)
    assert feasible >= 4


@pytest.mark.parametrize("schedule", ["zbv", "v_half", "dualpipev"])
def test_which_part_of_a_backward_is_longer_is_no_ground_to_leave_a_choice_out(schedule: str) -> None:
    """Five unlike units on two ranks, some of which may make less of the same backward pass gradients of weights."""
    for seed in range(12):
        draw = random.Random(seed)
        runs = []
        for index in range(5):
            backward, forward = draw.uniform(0.5, 3), draw.uniform(0.1, 3)
            shares = sorted((draw.uniform(0, 1) for _ in range(draw.choice([1, 1, 2]))), reverse=True)
            choices = (LayerCosts(forward=forward, backward=backward, backward_weight=s * backward) for s in shares)
            options = tuple(UnitChoice(label=(str(place),), costs=costs) for place, costs in enumerate(choices))
            runs.append(UnitRun(name=f"run{index}", count=1, choices=options))
        problem = StageProblem(
            runs=tuple(runs), schedule=schedule, num_ranks=2, num_chunks=4, num_microbatches=6, memory=(math.inf,) * 2
        )
        solution = solve_stages(problem, gap=1e-7)
        assert solution is not None and solution.objective == pytest.approx(brute_force(problem), rel=1e-6)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv", "v_half", "dualpipev"])
def test_one_long_run_in_several_chunks_a_rank_equals_exhaustive_enumeration(schedule: str) -> None:
    """What is proved of the longest chunk, and paths through the order, are rows of such programs alone."""
    feasible = 0
    for seed in cells(range(14), range(14, 24)):
        draw = Draw(seed)
        problem = draw.problem(schedule)
        ends = [replace(run, count=1) for run in problem.runs[:: max(1, len(problem.runs) - 1)]][
            : draw.random.randint(0, 2)
        ]
        run = replace(
            problem.runs[0], name="long", count=max(problem.num_chunks, draw.random.randint(3, 6)) - len(ends)
        )
        problem = replace(problem, runs=(*ends[:1], run, *ends[1:]))
        best, solution = brute_force(problem), solve_stages(problem, gap=1e-7)
        assert (solution is None) == math.isinf(best)
        if solution is None or run.count < 2 or main_run(folded(problem)) is None:
            continue
        feasible += 1
        assert solution.objective == pytest.approx(best, rel=1e-6)
        above, below = (solve_stages(problem, gap=1e-7, cutoff=best * share) for share in (1.01, 0.99))
        assert above is not None and above.objective == pytest.approx(best, rel=1e-6)
        assert below is not None and below.status == CUTOFF
        assert solution.assignment is not None
        chunks = as_step(folded(problem), solution.assignment).chunks
        longest = max(layer_sum(chunk, "forward", "backward") for chunk in chunks)
        assert longest_chunk(folded(problem), main_run(folded(problem)) or 0) <= longest * (1 + 1e-9)
    assert feasible >= 8


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bounds_within_memory_hold_for_long_runs(schedule: str) -> None:
    """And they see what memory costs: where it does, they are above the bound that leaves it out."""
    higher = tried = 0
    for seed in cells(range(12), range(12, 24)):
        draw = Draw(seed)
        problem = draw.problem(schedule)
        ends = (problem.runs[0],) * (len(problem.runs) > 1), (problem.runs[-1],) * (len(problem.runs) > 2)
        run = replace(problem.runs[len(ends[0])], count=draw.random.randint(8, 16))
        runs = tuple(replace(end, count=1) for end in ends[0]), tuple(replace(end, count=1) for end in ends[1])
        tight = draw.random.uniform(4, 14) * run.count / problem.num_ranks
        problem = replace(problem, runs=(*runs[0], run, *runs[1]), memory=(tight,) * problem.num_ranks)
        solution = solve_stages(problem, gap=1e-7)
        if solution is None:
            continue
        tried += 1
        quick, within = quick_bound(problem), bound_within_memory(problem)
        assert max(quick, within) <= solution.objective * (1 + 1e-9)
        higher += quick > lower_bound(problem) * (1 + 1e-3)
    assert tried >= 6 and higher >= 2


@pytest.mark.parametrize("num_layers", [5, 6, 7])
@pytest.mark.parametrize("ends", [(0.0, 0.1), (0.3, 0.4), (1.4, 0.2), (0.9, 2.3)])
def test_rounds_of_whole_layers_are_bounded_and_found(num_layers: int, ends: tuple[float, float]) -> None:
    """Three chunks a rank: a first, a middle and a last round; ends quicker and slower than a layer."""

    def choice(seconds: float) -> tuple[UnitChoice, ...]:
        return (UnitChoice(label=("whole",), costs=LayerCosts(forward=seconds / 3, backward=seconds * 2 / 3)),)

    seconds = (("embedding", 1, ends[0]), ("layers", num_layers, 1.0), ("head", 1, ends[1]))
    problem = StageProblem(
        runs=tuple(
            UnitRun(name=name, count=count, choices=choice(cost), receive_forward=0.02, receive_backward=0.03)
            for name, count, cost in seconds
        ),
        schedule="interleaved_1f1b",
        num_ranks=2,
        num_chunks=6,
        num_microbatches=8,
        memory=(math.inf,) * 2,
    )
    best, solution = brute_force(problem), solve_stages(problem, gap=1e-7)
    assert solution is not None and solution.objective == pytest.approx(best, rel=1e-6)
    assert 0.9 * best <= lower_bound(problem) <= best * (1 + 1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shortfall_tells_whether_memory_can_suffice(schedule: str) -> None:
    for seed in cells(range(100, 112), range(112, 124)):
        problem = Draw(seed).problem(schedule)
        short = memory_shortfall(problem)
        if not math.isinf(brute_force(problem)):
            assert short == 0.0
        elif problem.num_chunks == problem.num_ranks:
            assert short > 0.0


def test_units_of_no_size_do_not_fit_where_their_peak_does_not() -> None:
    problem = Draw(100).problem("1f1b")
    runs = tuple(
        replace(
            run,
            choices=tuple(
                replace(choice, costs=replace(choice.costs, state_bytes=0.0, saved_bytes=0.0, peak_bytes=8.0))
                for choice in run.choices
            ),
        )
        for run in problem.runs
    )
    assert memory_shortfall(replace(problem, runs=runs, memory=(1.0,) * problem.num_ranks)) == pytest.approx(7.0, abs=1)


def test_a_front_has_no_point_beyond_its_limit() -> None:
    nothing = Front(np.zeros(1), np.zeros(1), limit=3.0)
    large_and_small = np.array([1.0, 2.0]), np.array([5.0, 2.0]), np.array([0, 1])
    front = nothing.with_unit((0, 0), large_and_small)
    assert front.seconds.tolist() == [2.0] and front.units() == [(0, 0, 1)]
    assert not len(front.with_unit((0, 0), (np.array([1.0]), np.array([2.0]), np.array([0]))).seconds)
