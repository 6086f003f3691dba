"""Whether memory can suffice at all: the bytes that the tightest rank lacks under the leanest choices and best cuts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.step.stages.problem import ROUNDING, StageProblem

#: Relative precision of a shortfall found by bisection.
_PRECISION = 1e-6


def memory_shortfall(problem: StageProblem) -> float:
    """Bytes missing on the tightest rank whatever is chosen: a lower bound, 0 if nothing shows that memory is short.

    Exact for one chunk; to the precision of the bisection for one chunk a rank, where filling the ranks one after
    another decides it; with more chunks a rank units are taken to lie where they are held least often.
    """
    if all(math.isinf(limit) for limit in problem.memory):
        return 0.0
    held = [math.inf] * problem.num_ranks
    for rank, times in zip(problem.ranks, problem.in_flight):
        held[rank] = min(held[rank], times)
    leanest = {times: _leanest(problem, times) for times in set(held)}
    ranks = [leanest[times] for times in held]
    if problem.num_chunks == 1:
        need = min(
            lean.peak + sum(run.count * size for run, size in zip(problem.runs, lean.sizes)) for lean in ranks[0]
        )
        return max(0.0, need - problem.memory[0] * (1 + ROUNDING))
    enough = _one_after_another if problem.num_chunks == problem.num_ranks else _all_together
    if enough(problem, ranks, 0.0):
        return 0.0
    largest = max(
        lean.peak + sum(run.count * size for run, size in zip(problem.runs, lean.sizes))
        for levels in ranks
        for lean in levels
        if not any(math.isinf(size) for size in lean.sizes)
    )
    lower, upper = 0.0, largest
    while upper - lower > _PRECISION * upper and upper > 1.0:
        middle = (lower + upper) / 2
        if enough(problem, ranks, middle):
            upper = middle
        else:
            lower = middle
    return lower or upper


@dataclass(frozen=True)
class _Lean:
    """The fewest bytes that a unit of each run keeps, among choices that never need more than ``peak`` beyond that."""

    peak: float
    sizes: tuple[float, ...]


def _leanest(problem: StageProblem, held: float) -> list[_Lean]:
    """For each level of peaks, where a higher one lets some run keep less."""
    choices = [[choice.costs for choice in run.choices] for run in problem.runs]
    sizes = [[(c.peak_bytes, c.state_bytes + held * c.saved_bytes) for c in costs] for costs in choices]
    found: list[_Lean] = []
    for level in sorted({peak for run in sizes for peak, _ in run}):
        lean = _Lean(
            level, tuple(min((size for peak, size in run if peak <= level), default=math.inf) for run in sizes)
        )
        if not found or lean.sizes != found[-1].sizes:
            found.append(lean)
    return found


def _one_after_another(problem: StageProblem, ranks: Sequence[list[_Lean]], extra: float) -> bool:
    """Whether all units find a place if each rank, in order, takes as many as it can hold."""
    taken = 0
    for rank, (levels, limit) in enumerate(zip(ranks, problem.memory)):
        room = limit * (1 + ROUNDING) + extra
        end = max(_reach(problem, lean, room - lean.peak, taken) for lean in levels)
        end = min(end, problem.num_units - (problem.num_ranks - 1 - rank))
        if end <= taken:
            return False
        taken = end
    return taken == problem.num_units


def _reach(problem: StageProblem, lean: _Lean, room: float, taken: int) -> int:
    """The unit up to which a rank gets that begins at unit ``taken`` with ``room`` bytes."""
    start = 0
    for run, size in zip(problem.runs, lean.sizes):
        end = start + run.count
        if taken < end:
            here = end - taken if size * (end - taken) <= room else max(0, math.floor(room / size))
            room -= here * size if here else 0.0
            taken += here
            if taken < end:
                return taken
        start = end
    return taken


def _all_together(problem: StageProblem, ranks: Sequence[list[_Lean]], extra: float) -> bool:
    """Whether all ranks together have the bytes, and places for the units of each run."""
    rooms = [limit * (1 + ROUNDING) + extra - levels[0].peak for levels, limit in zip(ranks, problem.memory)]
    if min(rooms) < 0:
        return False
    least = [min(levels[-1].sizes[run] for levels in ranks) for run in range(len(problem.runs))]
    if sum(run.count * size for run, size in zip(problem.runs, least)) > sum(rooms):
        return False
    return all(
        sum(min(run.count, _whole(room, levels[-1].sizes[index])) for room, levels in zip(rooms, ranks)) >= run.count
        for index, run in enumerate(problem.runs)
    )


def _whole(room: float, size: float) -> float:
    return math.floor(room / size) if size else math.inf
