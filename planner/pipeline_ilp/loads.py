"""A quick lower bound of the largest load within memory: every rank as a fractional knapsack of seconds and bytes.

Let a rank hold n units of the long run beside its mandatory units. For every price λ ≥ 0 of a byte in seconds,

    Σ seconds + λ · Σ bytes ≤ L + λ · room

Every unit costs at least v(λ) = min_c (seconds(c) + λ · bytes(c)), whatever is chosen, so

    n ≤ (L + λ · room − Σ v(λ) of the mandatory units) / v(λ)

and n is whole. Only the λ at slopes between two choices are tried: between those the right side is the ratio of two
linear functions, hence monotone. Beyond state and saved activations a rank holds its largest peak, which is one of the
choices' peaks. For each such peak (neighbouring peaks are grouped; a group takes the room of its least), only choices
of no larger peak are allowed. If all ranks together cannot hold all units within L, the largest load exceeds L.
``planner.pipeline_ilp.ranks`` computes the same bound with whole choices, ten times as slowly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.pipeline_ilp.crossings import received
from planner.pipeline_ilp.fronts import LOAD
from planner.pipeline_ilp.pool import pooled_load
from planner.pipeline_ilp.ranks import main_run
from planner.pipeline_ilp.stage_problem import ROUNDING, StageProblem, UnitChoice, UnitRun
from planner.pipeline_ilp.stage_program import chunks_of

Array = NDArray[np.float64]
#: Seconds, bytes of state and bytes saved (rows) of some choices.
_Choices = Array

#: Relative precision of the bisection for the load.
_PRECISION = 1e-4
#: At the largest price of a byte, a choice's bytes cost so many times its seconds.
_MOST = 1e4
#: Peaks that differ by no more than this share of a rank's memory are grouped into one level.
_SAME = 0.01
#: Tolerance added to a number of units before it is rounded down.
_WHOLE = 1e-6


class LoadBound:
    """Bounds of the largest load of a problem whose units are one long run, with at most one unit at either end.

    ``apart`` says whether levels of peaks are distinguished. If not, all take the room of the least peak: weaker and
    quicker.
    """

    def __init__(self, problem: StageProblem, run: int, *, apart: bool = True) -> None:
        self.problem, self.run = problem, run
        self.chunks = chunks_of(problem)
        held = np.array(problem.in_flight, dtype=float)
        self.held = np.array([held[chunks] for chunks in self.chunks])
        self.received = np.array(received(problem, LOAD.receive))
        self.ends = [(0, problem.runs[0])] * (run > 0)
        self.ends += [(problem.num_chunks - 1, problem.runs[-1])] * (run < len(problem.runs) - 1)
        runs = [problem.runs[run], *(entry for _, entry in self.ends)]
        levels = _peaks(runs, _SAME * min(problem.memory)) if apart else [(0.0, math.inf)]
        lowest = self._lowest_peaks()
        self.levels = []
        before: list[_Choices] = []
        for index, (least, largest) in enumerate(levels):
            choices = [_choices(entry, largest) for entry in runs]
            if not before or any(not np.array_equal(*pair) for pair in zip(choices, before)):
                self.levels.append(self._level(np.full(problem.num_ranks, least) if index else lowest, choices))
            before = choices  # equal choices with a larger peak cannot fit better

    def _lowest_peaks(self) -> Array:
        """Lower bound of each rank's largest peak, from its mandatory units."""
        held = np.zeros(self.problem.num_ranks)
        for chunk, entry in self.ends:
            rank = self.problem.ranks[chunk]
            held[rank] = max(held[rank], _lowest_peak(entry))
        ends = {chunk for chunk, _ in self.ends}
        bare = np.array([not ends.issuperset(chunks) for chunks in self.chunks])
        return np.where(bare, np.maximum(held, _lowest_peak(self.problem.runs[self.run])), held)

    def most(self, load: float) -> float:
        """Upper bound of the units of the long run on all ranks, if none is busy for more than ``load`` seconds."""
        best = np.full(self.problem.num_ranks, -math.inf)
        for offset, slope, fixed in self.levels:
            units = (offset + slope * load).min(axis=1)
            units = np.where(units < -_WHOLE, -math.inf, np.floor(units + _WHOLE) + fixed)
            best = np.maximum(best, units)
        return float(best.sum())

    def least_load(self, lower: float, upper: float) -> float:
        """Lower bound of the largest load; ``lower`` is a proved bound, ``upper`` counts as infinite."""
        count = self.problem.runs[self.run].count
        if self.most(upper) < count:
            return upper
        if self.most(lower) >= count:
            return lower
        while upper - lower > _PRECISION * upper:
            middle = (lower + upper) / 2
            if self.most(middle) >= count:
                upper = middle
            else:
                lower = middle
        return lower

    def _level(self, least: Array, choices: Sequence[_Choices]) -> tuple[Array, Array, Array]:
        """(a, b, c) by rank and price of a byte: a rank holds at most c + min(a + b · load) units, if its largest peak
        is at least its ``least`` and allows ``choices``, of the long run and the ends."""
        problem = self.problem
        seconds, state, saved = choices[0]
        spare = self.held.min(axis=1)
        worth = _slopes(seconds, state + spare[:, None] * saved)
        cost_in_chunk = _cheapest(choices[0], self.held, worth)
        room = np.array(problem.memory)[:, None] * (1 + ROUNDING) - least[:, None]
        rest = worth * room - self.received[:, None] - cost_in_chunk.sum(axis=1)
        fixed = np.full(problem.num_ranks, float(self.held.shape[1]))
        for (chunk, _), end_choices in zip(self.ends, choices[1:]):
            rank = problem.ranks[chunk]
            place = self.chunks[rank].index(chunk)
            end_cost = _cheapest(end_choices, self.held[rank : rank + 1, place : place + 1], worth[rank : rank + 1])
            rest[rank] += cost_in_chunk[rank, place] - end_cost[0, 0]
            fixed[rank] -= 1
        unit = _cheapest(choices[0], spare[:, None], worth)[:, 0]
        return rest / unit, 1.0 / unit, fixed


def _peaks(runs: Sequence[UnitRun], width: float) -> list[tuple[float, float]]:
    """Levels of peaks, lowest first, as (least, largest) of the peaks grouped into each, at most ``width`` apart.

    Every run has a choice at or below each level.
    """
    floor = max(map(_lowest_peak, runs))
    levels: list[tuple[float, float]] = []
    for peak in sorted({max(floor, choice.costs.peak_bytes) for run in runs for choice in run.choices}):
        if levels and peak - levels[-1][0] <= width:
            levels[-1] = (levels[-1][0], peak)
        else:
            levels.append((peak, peak))
    return levels


def _lowest_peak(run: UnitRun) -> float:
    return min(choice.costs.peak_bytes for choice in run.choices)


def _choices(run: UnitRun, peak: float) -> _Choices:
    """Seconds, bytes of state and bytes saved of the choices whose peak is at most ``peak``: the undominated ones.

    Schedules share their runs, which are asked once.
    """
    if peak not in run.quickest:
        run.quickest[peak] = _undominated(run, peak)
    return run.quickest[peak]


def _undominated(run: UnitRun, peak: float) -> _Choices:
    rows = sorted(
        {
            (costs.forward + costs.backward, costs.state_bytes, costs.saved_bytes)
            for costs in (choice.costs for choice in run.choices)
            if costs.peak_bytes <= peak
        }
    )
    undominated_rows: list[tuple[float, float, float]] = []
    for row in rows:
        if not any(state <= row[1] and saved <= row[2] for _, state, saved in undominated_rows):
            undominated_rows.append(row)
    return np.array(undominated_rows, dtype=float).T


@functools.cache
def _pairs(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    first, second = np.triu_indices(count, 1)
    return first, second


def _slopes(seconds: Array, sizes: Array) -> Array:
    """Prices of a byte by rank: zero, those at which the cheapest choice changes, and one at which seconds hardly
    matter; ``sizes``: by rank and choice."""
    first, second = _pairs(len(seconds))
    slower = seconds[second] - seconds[first]
    freed = sizes[:, first] - sizes[:, second]
    with np.errstate(divide="ignore", invalid="ignore"):
        worth = np.where(slower * freed > 0, slower / freed, 0.0)
    costs = seconds + worth[:, :, None] * sizes[:, None, :]
    tied = costs[:, np.arange(len(first)), first] <= costs.min(axis=2) * (1 + ROUNDING)
    worth = -np.sort(-np.where(tied, worth, 0.0), axis=1)
    worth = worth[:, : int((worth > 0).sum(axis=1).max(initial=0))]
    most = _MOST * seconds.max() / np.maximum(1.0, sizes.min(axis=1))
    return np.concatenate((np.zeros((len(sizes), 1)), worth, most[:, None]), axis=1)


def _cheapest(choices: _Choices, held: Array, worth: Array) -> Array:
    """min_c (seconds + worth · bytes) by rank, chunk and worth."""
    seconds, state, saved = choices
    sizes = state + held[:, :, None] * saved
    return np.asarray((seconds + worth[:, None, :, None] * sizes[:, :, None, :]).min(axis=-1))


def _seconds(choice: UnitChoice) -> float:
    return choice.costs.forward + choice.costs.backward


class LoadWithinMemory:
    """Lower bounds of the largest load of a rank, for a ``folded`` problem of one kind; tables are made once for all
    limits."""

    def __init__(self, problem: StageProblem) -> None:
        self.problem = problem
        self.run = main_run(problem)

    def bound(self, *, lower: float, upper: float) -> float:
        """A bound of at least ``lower``.

        Args:
            lower: a proved bound of the load, in seconds.
            upper: seconds; a load that counts as infinite.
        """
        if not all(map(math.isfinite, self.problem.memory)):
            return lower
        if self.run is None:
            return max(lower, min(upper, self.pooled))
        upper = min(upper, 2.0 * self.slowest)
        if not lower < upper or min(map(_seconds, self.problem.runs[self.run].choices)) <= 0:
            return lower
        if self._roughly.most(upper) < self.problem.runs[self.run].count:
            return upper
        return self._by_levels.least_load(lower, upper)

    @functools.cached_property
    def pooled(self) -> float:
        """The load if all ranks share their memory."""
        return pooled_load(self.problem)

    @functools.cached_property
    def slowest(self) -> float:
        """Seconds of all units on one rank, each in its slowest choice."""
        return sum(entry.count * max(map(_seconds, entry.choices)) for entry in self.problem.runs)

    @functools.cached_property
    def _roughly(self) -> LoadBound:
        assert self.run is not None
        return LoadBound(self.problem, self.run, apart=False)

    @functools.cached_property
    def _by_levels(self) -> LoadBound:
        assert self.run is not None
        return LoadBound(self.problem, self.run)
