"""One chunk a rank, any runs: the least bottleneck over all contiguous cuts, exact in whole units and memory.

The time and memory of a stretch of units depend only on its number of units of each run. A limit on the load is
feasible if the ranks, each taking as many units as it can, reach the end of the model; bisection finds the least limit.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from planner.pipeline_ilp.crossings import received
from planner.pipeline_ilp.fronts import DualWeights, Front, Options, options_of
from planner.pipeline_ilp.stage_problem import ROUNDING, Assignment, StageProblem

#: Relative precision of the bottleneck.
_PRECISION = 1e-6

#: Above every finite load, below the infinite load of units that do not fit in memory.
LARGEST = 1e300

#: How many units of consecutive runs: ((run, count), …).
_Stretch = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Segments:
    """The assignment of least bottleneck (None if none fits in memory); ``load`` is a lower bound of the bottleneck."""

    load: float
    assignment: Assignment | None


class _Ranks:
    """Fronts of stretches of units on each rank, computed on demand."""

    def __init__(self, problem: StageProblem, weights: DualWeights, most: float) -> None:
        self.problem, self.weights, self.most = problem, weights, most
        self.held = problem.in_flight
        self.received = received(problem, weights.receive)
        self.run_of = [index for index, run in enumerate(problem.runs) for _ in range(run.count)]
        self.peaks = _peaks(problem)
        kinds = list(dict.fromkeys(problem.rank_runs))
        self.kinds = [kinds.index(runs) for runs in problem.rank_runs] or [0] * problem.num_ranks
        self.cache: dict[tuple[float, float, int, _Stretch], list[Front | None]] = {}
        self.options: dict[tuple[float, bool, int, int], list[tuple[Options, bool]]] = {}
        #: By unit, the least seconds of those after it that must be on its rank: all of them where there is one rank.
        least = [min(map(weights.unit, (choice.costs for choice in problem.runs[run].choices))) for run in self.run_of]
        self.after = [0.0] * len(least)
        if problem.num_ranks == 1 and math.isfinite(most):
            self.after = [*itertools.accumulate(reversed(least[1:]), initial=0.0)][::-1]

    def fronts(self, rank: int, stretch: _Stretch) -> list[Front]:
        """One front for each level of peaks that allows the stretch other choices than the level below it, which has
        more room."""
        return [front for front in self._by_level(rank, stretch) if front is not None]

    def _by_level(self, rank: int, stretch: _Stretch) -> list[Front | None]:
        """The same by level, None for those that allow nothing new."""
        held, limit = self.held[rank], self.problem.memory[rank]
        key = (held, limit, self.kinds[rank], stretch)
        if key not in self.cache:
            bounded = math.isfinite(limit)
            levels = self.peaks if bounded else [math.inf]
            rooms = [limit * (1 + ROUNDING) - level if bounded else math.inf for level in levels]
            if not stretch:
                empty = np.zeros(int(rooms[0] >= 0))
                self.cache[key] = [Front(empty, empty, rooms[0]), *[None] * (len(levels) - 1)]
            else:
                self.cache[key] = self._one_more(rank, stretch, levels, rooms)
        return self.cache[key]

    def _one_more(self, rank: int, stretch: _Stretch, levels: list[float], rooms: list[float]) -> list[Front | None]:
        """The fronts of a stretch from those without its last unit."""
        run, count = stretch[-1]
        shorter = (*stretch[:-1], (run, count - 1)) if count > 1 else stretch[:-1]
        options = self._options(rank, run, levels, bounded=math.isfinite(rooms[0]))
        fronts: list[Front | None] = []
        below: Front | None = None
        most = self.most - self.after[sum(units for _, units in stretch) - 1]
        for room, before, (choices, is_new) in zip(rooms, self._by_level(rank, shorter), options):
            below = below if before is None else before
            assert below is not None  # the lowest level is always there
            if before is None and not is_new:
                fronts.append(None)
                continue
            below_room = below if below.limit <= room else below.within(room)
            fronts.append(below_room.with_unit((rank, run), choices).up_to(most))
        return fronts

    def _options(self, rank: int, run: int, levels: list[float], *, bounded: bool) -> list[tuple[Options, bool]]:
        """What a unit of a run may be on a rank, for each level of peaks, and whether the level below had others."""
        held, choices = self.held[rank], self.problem.runs_on(rank)[run].choices
        key = (held, bounded, self.kinds[rank], run)
        if key not in self.options:
            options = [
                options_of(choices, self.weights.unit, peak=level, held=held, bounded=bounded) for level in levels
            ]
            is_new = [not np.array_equal(lower[2], upper[2]) for lower, upper in itertools.pairwise(options)]
            self.options[key] = list(zip(options, (True, *is_new)))
        return self.options[key]

    def stretch(self, begin: int, end: int) -> _Stretch:
        """The units from ``begin`` to ``end``."""
        inside = self.run_of[begin:end]
        return tuple((run, inside.count(run)) for run in dict.fromkeys(inside))

    def load(self, rank: int, stretch: _Stretch) -> float:
        """Lower bound of the rank's load in seconds; infinite if the stretch does not fit in memory."""
        loads = (float(front.seconds[0]) - front.lost for front in self.fronts(rank, stretch) if len(front.seconds))
        return min(loads, default=math.inf) + self.received[rank]

    def ends(self, limit: float) -> list[int] | None:
        """Where each rank ends if it takes all units it can within ``limit`` seconds; None if units remain."""
        problem, begin, ends = self.problem, 0, []
        for rank in range(problem.num_ranks):
            last = problem.num_units - (problem.num_ranks - 1 - rank)
            end = begin
            while end < last and self.load(rank, self.stretch(begin, end + 1)) <= limit:
                end += 1
            if end == begin:
                return None
            ends.append(end)
            begin = end
        return ends if begin == problem.num_units else None

    def assignment(self, ends: list[int]) -> Assignment:
        """Every rank's stretch in its fastest choices."""
        chunks, begin = [], 0
        for rank, end in enumerate(ends):
            fronts = [front for front in self.fronts(rank, self.stretch(begin, end)) if len(front.seconds)]
            counts: dict[tuple[int, int], int] = {}
            for _, run, choice in min(fronts, key=lambda front: float(front.seconds[0])).units():
                counts[run, choice] = counts.get((run, choice), 0) + 1
            chunks.append(tuple((run, choice, count) for (run, choice), count in sorted(counts.items())))
            begin = end
        return tuple(chunks)


def _peaks(problem: StageProblem) -> list[float]:
    """The levels of peaks; where one rank holds all units, those that allow each of them some choice."""
    peaks = {choice.costs.peak_bytes for run in problem.runs for choice in run.choices}
    lowest = [min(choice.costs.peak_bytes for choice in run.choices) for run in problem.runs]
    floor = max(lowest) if problem.num_ranks == 1 else min(lowest)
    return sorted(peak for peak in peaks if peak >= floor)


def cut_segments(problem: StageProblem, weights: DualWeights, *, load_bound: float, most: float = math.inf) -> Segments:
    """The least bottleneck of a problem with one chunk a rank, conversions left out.

    Args:
        load_bound: a proved lower bound to search from.
        most: seconds; a larger bottleneck may count as infinite.

    Returns:
        An infinite load means that the model does not fit in memory, or not within ``most``.
    """
    ranks = _Ranks(problem, weights, most * (1 + ROUNDING))
    best = ranks.ends(LARGEST)
    if best is None:
        # loads were unlimited, and ranks that take all they can hold leave the fewest units to the others
        return Segments(math.inf, None)
    lower, upper = load_bound, _bottleneck(ranks, best)
    while upper - lower > _PRECISION * upper:
        middle = (lower + upper) / 2 if lower > 0 else upper / 2
        ends = ranks.ends(middle)
        if ends is None:
            lower = middle
        else:
            best, upper = ends, min(middle, _bottleneck(ranks, ends))
    return Segments(lower, ranks.assignment(best))


def _bottleneck(ranks: _Ranks, ends: list[int]) -> float:
    begins = [0, *ends[:-1]]
    return max(ranks.load(rank, ranks.stretch(begin, end)) for rank, (begin, end) in enumerate(zip(begins, ends)))
