"""Least seconds in which chunks receive what crosses their boundaries, whatever units they begin with.

Nothing is received before the model's first unit, so no boundary lies there, and each lies before another unit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from planner.pipeline_ilp.stage_problem import StageProblem
from planner.pipeline_ilp.stage_program import spans


def received(problem: StageProblem, shares: tuple[float, float]) -> list[float]:
    """By rank, a lower bound of its seconds to receive boundaries, forward and backward each times its share."""
    total = [0.0] * problem.num_ranks
    for cut, forward, backward in _crossings(problem):
        total[problem.ranks[cut]] += shares[0] * forward
        total[problem.ranks[cut - 1]] += shares[1] * backward
    return total


def received_by_all(problem: StageProblem) -> tuple[float, float]:
    """Lower bounds of the seconds (forward, backward) to receive one micro-batch between ranks, over all chunks."""
    alike = _alike(problem)
    if alike is not None:
        count = sum(before != after for before, after in itertools.pairwise(problem.ranks))
        return count * alike[0], count * alike[1]
    crossings = list(_crossings(problem))
    copies = [run.count - (place == 0) for place, run in enumerate(problem.runs)]
    forward = cheapest_units(zip((run.receive_forward for run in problem.runs), copies), len(crossings))
    backward = cheapest_units(zip((run.receive_backward for run in problem.runs), copies), len(crossings))
    return (
        max(forward, sum(seconds for _, seconds, _ in crossings)),
        max(backward, sum(seconds for _, _, seconds in crossings)),
    )


def least_crossing(problem: StageProblem) -> tuple[float, float]:
    """Lower bounds of the seconds to receive one boundary between ranks, forward and backward."""
    alike = _alike(problem)
    if alike is not None:
        return alike
    crossings = list(_crossings(problem))
    return (
        min((forward for _, forward, _ in crossings), default=0.0),
        min((backward for _, _, backward in crossings), default=0.0),
    )


def cheapest_units(units: Iterable[tuple[float, int]], count: int) -> float:
    """The sum of the ``count`` least seconds, each unit once, of ``units`` (seconds of one, how many)."""
    total, left = 0.0, count
    for seconds, copies in sorted(units):
        places = min(left, copies)
        total, left = total + places * seconds, left - places
    return total


def _crossings(problem: StageProblem) -> Iterator[tuple[int, float, float]]:
    """The chunks that begin on another rank than the one before, and the least that they may receive, and return."""
    ranks, allowed = problem.ranks, spans(problem)
    for cut in range(1, problem.num_chunks):
        if ranks[cut] != ranks[cut - 1]:
            runs = [run for run, chunks in enumerate(allowed) if cut in chunks]
            here, before = problem.runs_on(ranks[cut]), problem.runs_on(ranks[cut - 1])
            yield cut, min(here[run].receive_forward for run in runs), min(before[run].receive_backward for run in runs)


def _alike(problem: StageProblem) -> tuple[float, float] | None:
    """Seconds of every boundary, forward and backward, where they are the same before whatever unit and rank."""
    costs = {
        (run.receive_forward, run.receive_backward)
        for runs in (problem.rank_runs or (problem.runs,))
        for place, run in enumerate(runs)
        if place or run.count > 1
    }
    return costs.pop() if len(costs) == 1 else None
