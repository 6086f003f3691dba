"""Several chunks a rank and several long runs: good cuts, by moving units off the busiest rank; nothing is proved."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from planner.step.cuts import greedy_partition
from planner.step.stage_fronts import Front, Weights, options_of
from planner.step.stage_problem import ROUNDING, Assignment, StageProblem
from planner.step.stage_program import chunks_of

#: How many of the least busy ranks are tried as the place for a unit of the busiest one.
_TARGETS = 4


def balance(problem: StageProblem, weights: Weights) -> Assignment | None:
    """Cuts that balance the ranks' seconds, then the fastest choices of each rank within its memory (None: not enough).

    Memory has no part in the cuts: schedules with several chunks a rank load the ranks' memory nearly alike.
    """
    fastest = [min(weights.unit(choice.costs) for choice in run.choices) for run in problem.runs]
    units = [run for run, entry in enumerate(problem.runs) for _ in range(entry.count)]
    ends = _balanced_ends(problem, [fastest[run] for run in units])
    counts: list[dict[tuple[int, int], int]] = [{} for _ in ends]
    begins = [0, *ends[:-1]]
    for rank, chunks in enumerate(chunks_of(problem)):
        slots = [(chunk, run) for chunk in chunks for run in units[begins[chunk] : ends[chunk]]]
        chosen = _fastest(problem, rank, slots, weights)
        if chosen is None:
            return None
        for chunk, run, choice in chosen:
            counts[chunk][run, choice] = counts[chunk].get((run, choice), 0) + 1
    return tuple(tuple((run, choice, count) for (run, choice), count in sorted(groups.items())) for groups in counts)


def _balanced_ends(problem: StageProblem, seconds: Sequence[float]) -> list[int]:
    """Where each chunk ends (in units), improved one unit at a time from the greedy partition."""
    sums = np.array([0.0, *itertools.accumulate(seconds)])
    ranks = np.array(problem.ranks)
    ends = np.array([*greedy_partition(seconds, problem.num_chunks)[0], len(seconds)])

    def loads(ends: np.ndarray) -> np.ndarray:
        chunks = np.diff(sums[np.concatenate(([0], ends))])
        return np.bincount(ranks, weights=chunks, minlength=problem.num_ranks)

    def cost(ends: np.ndarray) -> tuple[float, float]:
        found = loads(ends)
        return float(found.max()), float((found**2).sum())

    best = cost(ends)
    for _ in range(2 * len(seconds)):
        now = loads(ends)
        order = np.argsort(now)
        moves = [
            moved
            for giver in np.flatnonzero(ranks == order[-1])
            for taker in np.flatnonzero(np.isin(ranks, order[:_TARGETS]))
            if (moved := _moved(ends, int(giver), int(taker))) is not None
        ]
        nearest = min(moves, key=cost, default=ends)
        if cost(nearest) >= best:
            break
        ends, best = nearest, cost(nearest)
    return [int(end) for end in ends]


def _moved(ends: np.ndarray, giver: int, taker: int) -> np.ndarray | None:
    """The ends after one chunk gives a unit to another: all chunks between shift by one. None if it has just one."""
    if giver == taker or ends[giver] - (ends[giver - 1] if giver else 0) < 2:
        return None
    moved = ends.copy()
    if giver < taker:
        moved[giver:taker] -= 1
    else:
        moved[taker:giver] += 1
    return moved


def _fastest(
    problem: StageProblem, rank: int, slots: Sequence[tuple[int, int]], weights: Weights
) -> list[tuple[int, int, int]] | None:
    """The (chunk, run, choice) of every unit of a rank where it is fastest within memory, over all levels of peaks."""
    limit, held = problem.memory[rank], problem.in_flight
    bounded = math.isfinite(limit)
    runs = {run for _, run in slots}
    peaks = sorted({choice.costs.peak_bytes for run in runs for choice in problem.runs[run].choices})
    best: Front | None = None
    for level in peaks if bounded else [math.inf]:
        room = limit * (1 + ROUNDING) - level if bounded else math.inf
        front = Front(np.zeros(int(room >= 0)), np.zeros(int(room >= 0)), room)
        options = {
            (chunk, run): options_of(
                problem.runs[run].choices, weights.unit, peak=level, held=held[chunk], bounded=bounded
            )
            for chunk, run in set(slots)
        }
        for slot in slots:
            front = front.with_unit(slot, options[slot])
        if len(front.seconds) and (best is None or front.seconds[0] < best.seconds[0]):
            best = front
    return None if best is None else best.units()
