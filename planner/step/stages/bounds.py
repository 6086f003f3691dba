"""What no cut and no choice can beat: a lower bound of the step's seconds, and of the bytes that are missing.

Both are called for every mesh shape that a search might look into, so neither solves a program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cost_models.schedules import SCHEDULES
from planner.step.stages.memory import memory_shortfall
from planner.step.stages.problem import StageProblem, folded
from planner.step.stages.program import in_rounds

__all__ = ["TimeBounds", "bottleneck", "lower_bound", "memory_shortfall", "time_bounds"]

Array = NDArray[np.float64]

#: Relative precision of what is found by bisection.
_PRECISION = 1e-7
_EXTREMES = np.maximum, np.minimum


@dataclass(frozen=True)
class TimeBounds:
    """Proved lower bounds, in seconds.

    Attributes:
        load: of the largest load of a rank for one micro-batch.
        terms: pairs (times, rest): the whole step is at least times · (any bound of the largest load) + rest.
        whole: with rounds, what whole units say beside: (micro-batches, rest, pairs of a load and what filling adds to
            it); of one pair the step is at least micro-batches · (the load, or a bound if that is more) + fill + rest.
    """

    load: float
    terms: tuple[tuple[float, float], ...]
    whole: tuple[float, float, tuple[tuple[float, float], ...]] = (0.0, 0.0, ())

    @property
    def step(self) -> float:
        """Of the whole step."""
        return self.step_with(self.load)

    def step_with(self, load: float) -> float:
        """Of the whole step, if the largest load is at least ``load``."""
        least = max(times * load + rest for times, rest in self.terms)
        times, rest, pairs = self.whole
        return max(least, min((times * max(load, own) + fill for own, fill in pairs), default=0.0) + rest)

    def load_within(self, step: float) -> float:
        """The largest load that a step of so many seconds leaves room for."""
        return min(((step - rest) / times for times, rest in self.terms if times > 0), default=math.inf)


def lower_bound(problem: StageProblem) -> float:
    """Seconds that no assignment beats, whatever the memory."""
    return time_bounds(folded(problem)).step


def time_bounds(problem: StageProblem) -> TimeBounds:
    """Bounds from averages over ranks, and from units being whole; of a ``folded`` problem.

    A sum over units of the choice that is cheapest under fixed weights is a bound if the weighted figures never exceed
    the step: the largest load is at least the mean of the ranks, the tail at least a mean of what it is the largest of.
    Several such weightings are tried (``_weightings``).
    """
    counts = np.array([run.count for run in problem.runs], dtype=float)
    starts = np.cumsum([0, *(len(run.choices) for run in problem.runs[:-1])])
    figures = _figures(problem)
    received = _received(problem)
    cheapest = np.minimum.reduceat(figures[0] + figures[1], starts)
    mean = (float(cheapest @ counts) + sum(received)) / problem.num_ranks
    load = max(mean, bottleneck(problem, cheapest.tolist()))
    whole: tuple[float, float, tuple[tuple[float, float], ...]] = (0.0, 0.0, ())
    if in_rounds(problem):
        crossing = (
            min(run.receive_forward for run in problem.runs),
            min(run.receive_backward for run in problem.runs),
        )
        load = max(load, fewest_rounds(problem, cheapest.tolist(), crossing)[0].load)
        rest = float(np.minimum.reduceat(figures[4], starts) @ counts) / problem.num_ranks
        whole = float(problem.num_microbatches), rest, tuple(_filled_rounds(problem, cheapest.tolist(), crossing))
    terms = []
    for base, weights, first in _weightings(problem):
        total = float(np.minimum.reduceat(weights @ figures, starts) @ counts)
        total += weights[0] * received[0] + weights[1] * received[1]
        reduction = min(choice.costs.reduce_step for choice in problem.runs[0].choices) if first else 0.0
        terms.append((base, total + reduction))
    return TimeBounds(load, tuple(terms), whole)


def _filled_rounds(
    problem: StageProblem, seconds: Sequence[float], crossing: tuple[float, float]
) -> Iterator[tuple[float, float]]:
    """By the sum ℓ of the rounds' longest chunks, in units of the longest run: (seconds of ℓ, least fill beside it).

    Round j whose longest chunk holds ρ(j) units has D(j) others, at most (p − 1)·ρ(j). With Σ ρ = ℓ there are N − ℓ
    others in all; the largest D is least where the ρ are as even as they can be, s = ℓ mod v of them one more than
    q = ⌊ℓ/v⌋: the mean, or, where rounds of q do not hold so many, what they leave to the s others. All chunks receive
    both ways but the model's first and last, once each.
    """
    p, v = problem.num_ranks, problem.num_chunks // problem.num_ranks
    count, cost = max(((run.count, unit) for run, unit in zip(problem.runs, seconds)), key=math.prod)
    for units in range(-(-count // p), count + 1):
        others, (each, more) = count - units, divmod(units, v)
        most = others / v
        if more:
            most = max(most, (others - (v - more) * (p - 1) * each) / more)
        received = (p - 1) * sum(crossing) - max(crossing)
        yield units * cost + (v - 1) * sum(crossing), most * cost + received


def _figures(problem: StageProblem) -> Array:
    """One column for each choice of each run: forward, backward, W, reduce_step, update and gather."""
    return np.array(
        [
            (
                costs.forward,
                costs.backward,
                costs.backward_weight,
                costs.reduce_step,
                costs.update_step + costs.gather_step,
            )
            for run in problem.runs
            for costs in (choice.costs for choice in run.choices)
        ]
    ).T


def _received(problem: StageProblem) -> tuple[float, float]:
    """Seconds, forward and backward, that a micro-batch is at least on its way between ranks, all chunks together."""
    crossings = sum(before != after for before, after in itertools.pairwise(problem.ranks))
    return (
        crossings * min(run.receive_forward for run in problem.runs),
        crossings * min(run.receive_backward for run in problem.runs),
    )


def _weightings(problem: StageProblem) -> list[tuple[float, Array, bool]]:
    """Ways to write a bound of the step: (times the load bound, weights of the figures, first layer's reduction too).

    The step is M·L + fill + tail + update. L stands either for its bound or for the mean load (1/p of all); the fill
    for its sum, with max(0, x) ≥ x or ≥ 0; the tail for the first layer's reduction or for the mean over ranks of what
    is not hidden, in which each second of backward hides at most 1/p + (p-1)/(p·v).
    """
    p, v, m = problem.num_ranks, problem.num_chunks // problem.num_ranks, problem.num_microbatches
    schedule = SCHEDULES[problem.schedule]
    fills: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)]
    times = float(m)
    if schedule.splits_backward:
        forward, backward, weight = ((p - 1) / p * value for value in schedule.fill)
        fills.append((forward, backward, weight - backward))
    else:
        divisor = v if schedule.divided else 1
        times = m - 1 / divisor
        fills = [(1 / divisor, 1 / divisor, 0.0)]
    hides = 1 / p + (p - 1) / (p * v)
    reduces = any(choice.costs.reduce_step > choice.costs.backward for run in problem.runs for choice in run.choices)
    found = []
    for (forward, backward, weight), mean, hidden in itertools.product(fills, (True, False), (False, True)):
        if hidden and not reduces:
            continue
        share = times / p if mean else 0.0
        forward, backward = forward + share, backward + share - (hides if hidden else 0.0)
        if forward >= 0 and backward >= 0:
            weights = np.array([forward, backward, weight, 1 / p if hidden else 0.0, 1 / p])
            found.append((0.0 if mean else times, weights, not hidden))
    return found


def bottleneck(problem: StageProblem, seconds: Sequence[float]) -> float:
    """The largest load of a rank is at least this, if a unit of each run takes at least ``seconds`` of it.

    With one chunk a rank: the best contiguous partition. With more: the run that takes longest in all, spread over all
    ranks, with the model's first and last unit where they must be.
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
    ``middle`` units of each rank are left to the rounds between, all of whose chunks are full. ``load`` is the sum of
    the rounds' longest chunks.
    """

    load: float
    first: tuple[int, int]
    last: tuple[int, int]
    middle: int


def fewest_rounds(
    problem: StageProblem, seconds: Sequence[float], crossing: tuple[float, float], *, hold: int = 0, most: int = 1
) -> list[Rounds]:
    """The ``most`` shortest ways to divide the longest run over rounds, if a unit of each run takes ``seconds``.

    Rounds wait for their longest chunk, which holds whole units, so p equal units in a round take as long as one: the
    first load is a bound of any assignment's (for ``hold`` = 0).

    Args:
        crossing: seconds, forward and backward, to receive a boundary from another rank.
        hold: units that every chunk holds at least, but for one that holds an end of the model; if any, of equally
            short ways those come first whose rounds are most alike.
    """
    ranks, inner = problem.num_ranks, problem.num_chunks // problem.num_ranks - 2
    runs = [(run.count, cost) for run, cost in zip(problem.runs, seconds)]
    longest = max(range(len(runs)), key=lambda run: runs[run][0] * runs[run][1])
    count, cost = runs[longest]
    everywhere = (inner + 2) * sum(crossing)
    if cost <= 0:
        return [Rounds(everywhere, (0, 0), (0, 0), count)]
    ends = []
    for other, received in ((0, crossing[0]), (len(runs) - 1, crossing[1])):
        bare = other == longest  # the model's ends receive nothing from before, or after, it
        found = _end_rounds(ranks, count, cost, (0.0 if bare else runs[other][1]) - received)
        ends.append([way for way in found if way[2] >= hold and way[1] >= (hold if bare else 0)])
    first, last = (np.array(found, dtype=float).reshape(-1, 3) for found in ends)
    room = [end[:, 1] + (ranks - 1) * end[:, 2] for end in (first, last)]
    rest = np.ceil(np.maximum(0.0, count - room[0][:, None] - room[1]) / ranks)
    middle = np.maximum(rest, inner * hold)
    loads = first[:, 0][:, None] + last[:, 0] + middle * cost + everywhere
    if not inner:
        loads = np.where(rest > 0, np.inf, loads)
    shortest = np.argsort(loads, axis=None)[:most]
    if hold and inner:
        tallest, lowest = (pick(pick.outer(first[:, 0], last[:, 0]), middle / inner * cost) for pick in _EXTREMES)
        shortest = np.lexsort(((tallest - lowest).ravel(), np.round(loads / cost, 6).ravel()))[:most]
    return [
        Rounds(float(loads[i, j]), ends[0][i][1:], ends[1][j][1:], int(middle[i, j]))
        for i, j in zip(*np.unravel_index(shortest, loads.shape))
        if math.isfinite(loads[i, j])
    ]


def _end_rounds(ranks: int, count: int, cost: float, end: float) -> list[tuple[float, int, int]]:
    """(seconds of the longest chunk, units beside the model's end, units of each other chunk) of its round."""
    found = set()
    for units in range(-(-count // (ranks - 1)) + 1 + max(0, math.ceil(end / cost))):
        if units * cost >= end:
            found.add((units * cost, math.floor((units * cost - end) / cost + 1e-9), units))
        if end + units * cost >= 0:
            found.add((end + units * cost, units, math.floor((end + units * cost) / cost + 1e-9)))
    return sorted(found)


def _stages(runs: Sequence[tuple[int, float]], limit: float, num_stages: int) -> bool:
    """Whether stages of at most ``limit`` suffice, filled one after another."""
    limit *= 1 + 1e-12
    used, room = 1, limit
    for count, cost in runs:
        if cost <= 0:
            continue
        here = min(count, int(room / cost))
        room -= here * cost
        rest = count - here
        if rest:
            whole = int(limit / cost)
            if not whole:
                return False
            stages = -(-rest // whole)
            used += stages
            room = limit - (rest - (stages - 1) * whole) * cost
    return used <= num_stages


def _spread(problem: StageProblem, runs: Sequence[tuple[int, float]]) -> float:
    """The least load at which every rank, filled with whole units, holds all of the run that takes longest."""
    longest = max(range(len(runs)), key=lambda run: runs[run][0] * runs[run][1])
    count, cost = runs[longest]
    if cost <= 0:
        return 0.0
    ends = [0.0] * problem.num_ranks
    if longest > 0:
        ends[0] += runs[0][1]
    if longest < len(runs) - 1:
        ends[problem.ranks[-1]] += runs[-1][1]
    # the load is one rank's ends and whole units: try each rank's from the least number of units on
    least = sum(ends) + count * cost
    best = math.inf
    for end in sorted(set(ends)):
        units = max(0, math.floor((least / problem.num_ranks - end) / cost) - 1)
        while _room(ends, cost, end + units * cost) < count:
            units += 1
        best = min(best, end + units * cost)
    return best


def _room(ends: Sequence[float], cost: float, load: float) -> int:
    """How many units fit on all ranks with at most ``load`` each; a rank whose ends take more holds none."""
    return sum(max(0, math.floor((load - end) / cost + 1e-9)) for end in ends)
