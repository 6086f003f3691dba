"""Stage problems of unequal ranks: the program and its bounds against an enumeration with formulas of its own."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from cost_models.step import LayerCosts
from planner.pipeline_ilp.stage_bounds import lower_bound
from planner.pipeline_ilp.stage_ilp import bound_within_memory, solve_stages
from planner.pipeline_ilp.stage_problem import UNEQUAL_SCHEDULES, StageProblem, UnitChoice, UnitRun, least_of

NUM_PROBLEMS = 21


def mixed_problem(seed: int) -> StageProblem:
    """Two or three ranks of two kinds of devices, five or six units in up to three runs, two or three choices."""
    draw = random.Random(seed)
    ranks, m = draw.choice((2, 3)), draw.choice((3, 4, 8))
    counts = draw.choice(((1, 4, 1), (5,), (2, 3), (1, 3, 1)))
    speeds = [draw.choice((1.0, 0.4)) for _ in range(ranks)]
    for rank, speed in zip(draw.sample(range(ranks), 2), (0.4, 1.0)):
        speeds[rank] = speed
    num_choices = draw.choice((2, 3)) if len(counts) < 3 else 2
    plain = [[unit_figures(draw) for _ in range(num_choices)] for _ in counts]
    received = [draw.uniform(0.0, 0.3) for _ in counts]
    rank_runs = tuple(
        tuple(
            UnitRun(
                name=f"run {run}",
                count=count,
                choices=tuple(
                    UnitChoice(label=(str(index),), costs=scaled(costs, speed, odd))
                    for index, costs in enumerate(plain[run])
                ),
                receive_forward=received[run] * odd,
                receive_backward=received[run],
            )
            for run, count in enumerate(counts)
        )
        for speed, odd in zip(speeds, [1.0 if speed == 1.0 else draw.uniform(0.6, 1.4) for speed in speeds])
    )
    memory = tuple(draw.choice((60.0, 90.0, 200.0)) for _ in range(ranks))
    schedule = draw.choice(UNEQUAL_SCHEDULES)
    return StageProblem(
        runs=least_of(rank_runs, split=schedule == "zb_h1"), schedule=schedule, num_ranks=ranks, num_chunks=ranks,
        num_microbatches=m - (schedule == "zb_h1" and m % ranks), memory=memory, rank_runs=rank_runs,
    )  # fmt: skip


def unit_figures(draw: random.Random) -> LayerCosts:
    forward = draw.uniform(0.5, 2.0)
    return LayerCosts(
        forward=forward, backward=2 * forward * draw.uniform(0.8, 1.4),
        backward_weight=forward * draw.uniform(0.4, 1.4), gather_forward=draw.choice((0.0, forward * 1.2)),
        gather_backward=draw.choice((0.0, forward)), reduce_backward=draw.choice((0.0, forward * 1.5)),
        reduce_step=draw.choice((0.0, 9 * forward)), update_step=draw.uniform(0.0, 0.5),
        gather_step=draw.choice((0.0, 0.4)), state_bytes=draw.uniform(2.0, 12.0), saved_bytes=draw.uniform(0.5, 6.0),
        peak_bytes=draw.uniform(1.0, 9.0),
    )  # fmt: skip


def scaled(costs: LayerCosts, speed: float, odd: float) -> LayerCosts:
    """The figures on a device of another speed, which is better at some things than at others."""
    seconds = ("forward", "backward", "backward_weight", "gather_forward", "gather_backward", "reduce_backward",
               "reduce_step")  # fmt: skip
    uneven = ("reduce_backward", "reduce_step", "backward_weight")
    changed = {name: getattr(costs, name) / speed * (odd if name in uneven else 1.0) for name in seconds}
    return dataclasses.replace(costs, **changed, update_step=costs.update_step / speed * odd)


def every_assignment(problem: StageProblem) -> Iterator[list[list[tuple[int, int]]]]:
    """By rank, the (run, choice) of every unit in every cut and choice; the order of a run's units counts."""
    units = [run for run, entry in enumerate(problem.runs) for _ in range(entry.count)]
    for choices in itertools.product(*(range(len(problem.runs[run].choices)) for run in units)):
        row = list(zip(units, choices))
        for cuts in itertools.combinations(range(1, len(units)), problem.num_ranks - 1):
            yield [row[begin:end] for begin, end in itertools.pairwise((0, *cuts, len(units)))]


def seconds_and_fit(problem: StageProblem, ranks: Sequence[Sequence[tuple[int, int]]]) -> tuple[float, bool]:
    """The step by the formula in the docstring of ``cost_models.step_time``, and whether every rank's bytes fit."""
    p, m, split = problem.num_ranks, problem.num_microbatches, problem.schedule == "zb_h1"
    forward, backward, weights, slacks, reduced, waited, updates, fits = [], [], [], [], [], [], [], True
    for rank, placed in enumerate(ranks):
        costs = [problem.rank_runs[rank][run].choices[choice].costs for run, choice in placed]
        received = problem.rank_runs[rank][placed[0][0]].receive_forward if rank else 0.0
        returned = problem.rank_runs[rank][ranks[rank + 1][0][0]].receive_backward if rank + 1 < p else 0.0
        forward.append(sum(max(each.forward, each.gather_forward) for each in costs) + received)
        parts = [backward_and_weight(each, split=split) for each in costs]
        backward.append(sum(both for both, _ in parts) + returned)
        weights.append(sum(weight for _, weight in parts))
        slacks.append(sum(max(0.0, both - 2 * weight) for both, weight in parts))
        sent = [each.gather_backward + each.reduce_backward + each.reduce_step for each in costs]
        held_up = [max(0.0, c - max(each.backward, c - each.reduce_step)) for c, each in zip(sent, costs)]
        waited.append(sum(wait for wait, each in zip(held_up, costs) if each.gather_backward and not split))
        reduced.append(sum(each.reduce_backward + each.reduce_step for each in costs) if split else sum(sent))
        updates.append(sum(each.update_step + each.gather_step for each in costs))
        flight = m if problem.schedule == "gpipe" else min(m, p if split else p - rank)
        used = sum(each.state_bytes + flight * each.saved_bytes for each in costs)
        fits &= used + max(each.peak_bytes for each in costs) <= problem.memory[rank] * (1 + 1e-9)
    loads = [f + b for f, b in zip(forward, backward)]
    windows = [sum(backward[: rank + 1]) + sum(waited[: rank + 1]) for rank in range(p)]
    if split:
        windows = [weights[rank] + sum(slacks[:rank]) for rank in range(p)]
    first_run, first_choice = ranks[0][0]
    opening = problem.rank_runs[0][first_run].choices[first_choice].costs.reduce_step
    tail = max(opening, sum(waited) + max(0.0, *(c - window for c, window in zip(reduced, windows))))
    if split:
        chunks = zip(forward, backward, weights, strict=True)
        fill = sum(max(f + b - 2 * weight, f, b - weight) for f, b, weight in chunks) * (p - 1) / p
        return m * max(loads) + fill + tail + max(updates), fits
    longest = max(forward) + max(backward) if problem.schedule == "gpipe" else max(loads)
    return (m - 1) * longest + sum(loads) + tail + max(updates), fits


def backward_and_weight(costs: LayerCosts, *, split: bool) -> tuple[float, float]:
    """Seconds of a unit's backward pass and of its weight gradients, with what is communicated beside them."""
    if not split or not costs.gather_backward:
        return max(costs.backward, costs.gather_backward + costs.reduce_backward), costs.backward_weight
    weight = max(costs.backward_weight, costs.reduce_backward)
    return max(costs.backward - costs.backward_weight, costs.gather_backward) + weight, weight


@pytest.mark.parametrize("seed", range(NUM_PROBLEMS))
def test_the_program_finds_what_an_enumeration_of_a_mixed_problem_finds(seed):
    problem = mixed_problem(seed)
    priced = [seconds_and_fit(problem, ranks) for ranks in every_assignment(problem)]
    best = min((seconds for seconds, fits in priced if fits), default=None)
    solved = solve_stages(problem, gap=0.0)
    if best is None:
        assert solved is None
        return
    assert solved is not None and solved.objective == pytest.approx(best, rel=1e-9)
    assert solved.bound == pytest.approx(best, rel=1e-9)
    assert lower_bound(problem) <= best * (1 + 1e-9)
    assert bound_within_memory(problem) <= best * (1 + 1e-9)
    if seed % 4 == 0:
        free = dataclasses.replace(problem, memory=(1e9,) * problem.num_ranks)
        assert lower_bound(free) <= min(seconds for seconds, _ in priced) * (1 + 1e-9)


def test_the_problems_are_mixed_and_most_of_them_have_a_solution():
    problems = [mixed_problem(seed) for seed in range(NUM_PROBLEMS)]
    assert all(len(set(problem.rank_runs)) > 1 for problem in problems)
    assert sum(solve_stages(problem) is not None for problem in problems) >= 20


def test_other_schedules_are_refused_by_name_for_unequal_ranks():
    problem = mixed_problem(0)
    for schedule, chunks in (("zb_h2", 1), ("interleaved_1f1b", 2)):
        with pytest.raises(ValueError, match=f"{schedule}.*unequal ranks.*1f1b or gpipe or zb_h1"):
            dataclasses.replace(problem, schedule=schedule, num_chunks=chunks * problem.num_ranks)
