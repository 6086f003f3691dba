"""Lower bounds over all cuts and choices: of the step's seconds, and of the memory shortfall in bytes.

The search calls both for every mesh shape that it might explore, so neither solves a program.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.pipeline_ilp.average_bounds import Array, ChainFigures, TimeBounds, average_bounds, chain_figures
from planner.pipeline_ilp.crossings import least_crossing
from planner.pipeline_ilp.memory_shortfall import memory_shortfall
from planner.pipeline_ilp.stage_problem import StageProblem, folded
from planner.pipeline_ilp.stage_program import in_rounds

__all__ = ["TimeBounds", "bottleneck", "lower_bound", "memory_shortfall", "time_bounds"]

#: Relative precision of bisections.
_PRECISION = 1e-7
_EXTREMES = np.maximum, np.minimum


def lower_bound(problem: StageProblem) -> float:
    """Seconds that no assignment beats, whatever the memory."""
    return time_bounds(folded(problem)).step


def time_bounds(
    problem: StageProblem, average: TimeBounds | None = None, units: ChainFigures | None = None
) -> TimeBounds:
    """Bounds from averages over ranks, and from units being whole; of a ``folded`` problem.

    Args:
        average, units: its ``average_bounds`` and ``chain_figures``, if they are there already.
    """
    units = chain_figures(problem) if units is None else units
    average = average_bounds(problem, units) if average is None else average
    cheapest = units.cheapest.tolist()
    load = max(average.load, bottleneck(problem, cheapest))
    if not in_rounds(problem):
        return replace(average, load=load)
    crossing = least_crossing(problem)
    load = max(load, shortest_rounds(problem, cheapest, crossing))
    whole = float(problem.num_microbatches), units.updated, _filled_rounds(problem, cheapest, crossing)
    return replace(average, load=load, whole=whole)


def _filled_rounds(
    problem: StageProblem, seconds: Sequence[float], crossing: tuple[float, float]
) -> tuple[Array, Array]:
    """(seconds of ℓ, least fill) for every sum ℓ of the rounds' longest chunks, in units of the longest run.

    Round j whose longest chunk holds ρ(j) units has D(j) others, at most (p − 1)·ρ(j). With Σ ρ = ℓ there are N − ℓ
    others in all; the largest D is least where the ρ are as even as they can be, s = ℓ mod v of them one more than
    q = ⌊ℓ/v⌋: the mean, or, where rounds of q do not hold so many, what they leave to the s others. All chunks receive
    both ways but the model's first and last, once each.
    """
    p, v = problem.num_ranks, problem.num_chunks // problem.num_ranks
    count, cost = max(((run.count, unit) for run, unit in zip(problem.runs, seconds)), key=math.prod)
    units = np.arange(-(-count // p), count + 1, dtype=np.float64)
    others, (units_per_round, more) = count - units, np.divmod(units, v)
    most = others / v
    rest = (others - (v - more) * (p - 1) * units_per_round) / np.maximum(more, 1)
    most = np.where(more > 0, np.maximum(most, rest), most)
    received = (p - 1) * sum(crossing) - max(crossing)
    loads: Array = units * cost + (v - 1) * sum(crossing)
    return loads, most * cost + received


def bottleneck(problem: StageProblem, seconds: Sequence[float]) -> float:
    """Lower bound of the largest load of a rank, if a unit of each run takes at least ``seconds`` of its rank.

    With one chunk a rank: the best contiguous partition. With more: the run with the longest total time, spread over
    all ranks, with the model's first and last unit on their fixed ranks.
    """
    runs = [(run.count, cost) for run, cost in zip(problem.runs, seconds)]
    lower = sum(count * cost for count, cost in runs) / problem.num_ranks
    if problem.num_chunks > problem.num_ranks:
        return max(lower, _spread(problem, runs))
    upper = lower + max(cost for _, cost in runs)
    if _stages(runs, lower, problem.num_ranks):
        return lower
    while upper - lower > _PRECISION * upper:
        middle = (lower + upper) / 2
        if _stages(runs, middle, problem.num_ranks):
            upper = middle
        else:
            lower = middle
    return lower


@dataclass(frozen=True)
class Rounds:
    """How many units of the longest run the chunks of an interleaved schedule hold, round by round.

    ``first`` and ``last`` are (units of the chunk that holds the model's end, of each other chunk of that round);
    ``middle`` is the number of units of each rank in the rounds between, whose chunks are all full. ``load`` is the sum
    of the rounds' longest chunks.
    """

    load: float
    first: tuple[int, int]
    last: tuple[int, int]
    middle: int


def shortest_rounds(problem: StageProblem, seconds: Sequence[float], crossing: tuple[float, float]) -> float:
    """Seconds of the shortest division of ``fewest_rounds``: a lower bound of the load of any assignment."""
    return float(_divisions(problem, seconds, crossing, hold=0).loads.min())


def fewest_rounds(
    problem: StageProblem, seconds: Sequence[float], crossing: tuple[float, float], *, hold: int = 0, most: int = 1
) -> list[Rounds]:
    """The ``most`` shortest divisions of the longest run over rounds, if a unit of each run takes ``seconds``.

    A round waits for its longest chunk, which holds whole units, so p equal units in a round take as long as one.

    Args:
        crossing: seconds, forward and backward, to receive a boundary from another rank.
        hold: minimum number of units in every chunk that holds no end of the model; if positive, ties are broken in
            favour of the most equal rounds.
    """
    divisions = _divisions(problem, seconds, crossing, hold=hold)
    (first, last), loads, middle = divisions.ends, divisions.loads, divisions.middle
    shortest = np.argsort(loads, axis=None)[:most]
    inner = problem.num_chunks // problem.num_ranks - 2
    if hold and inner and divisions.cost > 0:
        heights = first[:, 0], last[:, 0]
        each = middle / inner * divisions.cost
        tallest, lowest = (pick(pick.outer(*heights), each) for pick in _EXTREMES)
        shortest = np.lexsort(((tallest - lowest).ravel(), np.round(loads / divisions.cost, 6).ravel()))[:most]
    return [
        Rounds(float(loads[i, j]), _units(first[i]), _units(last[j]), int(middle[i, j]))
        for i, j in zip(*np.unravel_index(shortest, loads.shape))
        if math.isfinite(loads[i, j])
    ]


@dataclass(frozen=True)
class _Divisions:
    """Every pair of a first and a last round: (seconds of the longest chunk, units beside the model's end, units of
    each other chunk) of each, units in the rounds between, and the load; ``cost`` is of one unit."""

    ends: tuple[Array, Array]
    middle: Array
    loads: Array
    cost: float


def _divisions(
    problem: StageProblem, seconds: Sequence[float], crossing: tuple[float, float], *, hold: int
) -> _Divisions:
    ranks, inner = problem.num_ranks, problem.num_chunks // problem.num_ranks - 2
    runs = [(run.count, cost) for run, cost in zip(problem.runs, seconds)]
    longest = max(range(len(runs)), key=lambda run: runs[run][0] * runs[run][1])
    count, cost = runs[longest]
    everywhere = (inner + 2) * sum(crossing)
    if cost <= 0:
        return _Divisions(
            (np.zeros((1, 3)), np.zeros((1, 3))), np.full((1, 1), count), np.full((1, 1), everywhere), cost
        )
    ends = []
    for other, received in ((0, crossing[0]), (len(runs) - 1, crossing[1])):
        bare = other == longest  # the model's ends receive nothing from outside
        rows = _end_rounds(ranks, count, cost, (0.0 if bare else runs[other][1]) - received)
        if hold:
            rows = rows[(rows[:, 2] >= hold) & (rows[:, 1] >= (hold if bare else 0))]
        ends.append(rows)
    first, last = ends
    room = [end[:, 1] + (ranks - 1) * end[:, 2] for end in (first, last)]
    rest = np.ceil(np.maximum(0.0, count - room[0][:, None] - room[1]) / ranks)
    middle = np.maximum(rest, inner * hold)
    loads = first[:, 0][:, None] + last[:, 0] + middle * cost + everywhere
    if not inner:
        loads = np.where(rest > 0, np.inf, loads)
    return _Divisions((first, last), middle, loads, cost)


def _units(end: Array) -> tuple[int, int]:
    """Units beside the model's end, and of each other chunk of its round."""
    return int(end[1]), int(end[2])


@functools.lru_cache(maxsize=4096)
def _end_rounds(ranks: int, count: int, cost: float, end: float) -> Array:
    """Possible (seconds of the longest chunk, units beside the model's end, units of each other chunk) of a round, a
    row each."""
    units = np.arange(-(-count // (ranks - 1)) + 1 + max(0, math.ceil(end / cost)), dtype=np.float64)
    seconds = units * cost
    holds, ends = seconds >= end, end + seconds >= 0
    others = np.stack((seconds, np.floor((seconds - end) / cost + 1e-9), units), axis=1)[holds]
    longest = np.stack((end + seconds, units, np.floor((end + seconds) / cost + 1e-9)), axis=1)[ends]
    rows = np.concatenate((others, longest))
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    return rows[np.append(True, (rows[1:] != rows[:-1]).any(axis=1))[: len(rows)]]


def _stages(runs: Sequence[tuple[int, float]], limit: float, num_stages: int) -> bool:
    """Whether ``num_stages`` stages of at most ``limit`` seconds suffice, filled one after another."""
    limit *= 1 + 1e-12
    used, room = 1, limit
    for count, cost in runs:
        if cost <= 0:
            continue
        num_fitting = min(count, int(room / cost))
        room -= num_fitting * cost
        rest = count - num_fitting
        if rest:
            whole = int(limit / cost)
            if not whole:
                return False
            stages = -(-rest // whole)
            used += stages
            room = limit - (rest - (stages - 1) * whole) * cost
    return used <= num_stages


def _spread(problem: StageProblem, runs: Sequence[tuple[int, float]]) -> float:
    """The least load at which the ranks, filled with whole units, hold all of the run with the longest total time."""
    longest = max(range(len(runs)), key=lambda run: runs[run][0] * runs[run][1])
    count, cost = runs[longest]
    if cost <= 0:
        return 0.0
    ends = [0.0] * problem.num_ranks
    if longest > 0:
        ends[0] += runs[0][1]
    if longest < len(runs) - 1:
        ends[problem.ranks[-1]] += runs[-1][1]
    # the load is some rank's ends plus whole units: for each rank, increase the units until all fit
    least = sum(ends) + count * cost
    best = math.inf
    for end in sorted(set(ends)):
        units = max(0, math.floor((least / problem.num_ranks - end) / cost) - 1)
        while _room(ends, cost, end + units * cost) < count:
            units += 1
        best = min(best, end + units * cost)
    return best


def _room(ends: Sequence[float], cost: float, load: float) -> int:
    """How many units fit on all ranks within a load of ``load`` each; a rank whose ends exceed it holds none."""
    return sum(max(0, math.floor((load - end) / cost + 1e-9)) for end in ends)
