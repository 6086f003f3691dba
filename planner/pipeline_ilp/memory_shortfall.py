"""Lower bound of the memory shortfall on the tightest rank, in bytes, under the leanest choices and best cuts."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from planner.pipeline_ilp.stage_problem import ROUNDING, StageProblem

#: Relative precision of the bisection for the shortfall.
_PRECISION = 1e-6


def memory_shortfall(problem: StageProblem) -> float:
    """Lower bound of the bytes missing on the tightest rank, whatever is chosen; 0 if memory may suffice.

    Exact for one chunk. For one chunk a rank exact to the precision of the bisection, by filling the ranks in order.
    For more chunks a rank a relaxation: units lie in the rank's chunk with the fewest micro-batches in flight.
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
    """The fewest bytes of state and saved activations of a unit of each run, of choices with peaks up to ``peak``."""

    peak: float
    sizes: tuple[float, ...]


def _leanest(problem: StageProblem, held: float) -> list[_Lean]:
    """The leanest choices for each level of peaks at which some run needs fewer bytes than below."""
    choices = ((index, choice.costs) for index, run in enumerate(problem.runs) for choice in run.choices)
    sizes = [(costs.peak_bytes, index, costs.state_bytes + held * costs.saved_bytes) for index, costs in choices]
    levels: list[_Lean] = []
    fewest = [math.inf] * len(problem.runs)
    for level, choices_of_level in itertools.groupby(sorted(sizes), key=operator.itemgetter(0)):
        for _, index, size in choices_of_level:
            fewest[index] = min(fewest[index], size)
        lean = _Lean(level, tuple(fewest))
        if not levels or lean.sizes != levels[-1].sizes:
            levels.append(lean)
    return levels


def _one_after_another(problem: StageProblem, ranks: Sequence[list[_Lean]], extra: float) -> bool:
    """Whether all units fit if each rank, in order, holds as many as it can."""
    num_placed = 0
    for rank, (levels, limit) in enumerate(zip(ranks, problem.memory)):
        room = limit * (1 + ROUNDING) + extra
        end = max(_reach(problem, lean, room - lean.peak, num_placed) for lean in levels)
        end = min(end, problem.num_units - (problem.num_ranks - 1 - rank))
        if end <= num_placed:
            return False
        num_placed = end
    return num_placed == problem.num_units


def _reach(problem: StageProblem, lean: _Lean, room: float, position: int) -> int:
    """The end (exclusive) of the units that fit in ``room`` bytes, beginning at unit ``position``."""
    start = 0
    for run, size in zip(problem.runs, lean.sizes):
        end = start + run.count
        if position < end:
            if room < 0:  # by no unit more, even of no size
                return position
            num_fitting = end - position if size * (end - position) <= room else math.floor(room / size)
            room -= num_fitting * size if num_fitting else 0.0
            position += num_fitting
            if position < end:
                return position
        start = end
    return position


def _all_together(problem: StageProblem, ranks: Sequence[list[_Lean]], extra: float) -> bool:
    """Whether all ranks together have the bytes for all units, and room for the units of each run by itself."""
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
