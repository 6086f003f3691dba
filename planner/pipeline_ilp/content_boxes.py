r"""One chunk a rank and one long run: the best assignment by branch and bound over boxes of the step's largest figures.

A content of a rank (``rank_contents``) has a load ℓ, a part φ of the fill, reductions s that its own last backward pass
does not hide, seconds h that hide those of other ranks, and an update u. The step of contents c(r), one for each rank,
is at least

    M·L + Σ_r φ(c(r)) + T + U,     L = max_r ℓ(c(r)),  U = max_r u(c(r)),
                                   T = max(0, max_r (s(c(r)) - Σ_{r'<r} h(c(r'))), the first unit's reduction)

where M = m, or m - 1 under a whole backward pass of several ranks; of GPipe, which is as slow as the slowest forward
and the slowest backward, it is only a bound. In a box of what L, U and T may be, contents above it are out, and ranks
hang together by how many units they hold alone: a table over these, rank by rank, has the least sum of φ, which with
the lower corner of the box is a bound. (Of ranks before r, h counts with the most that any content in the box has.) The
table's assignment is one to offer. Boxes are halved where that costs most, least bound first. The program's relaxation
mixes contents, and branching on it takes thousands of nodes where this takes a hundred boxes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cost_models.schedules import SCHEDULES
from planner.pipeline_ilp.rank_contents import EXPOSED, FILL, HIDES, LOAD, UPDATE, Array, Contents
from planner.pipeline_ilp.ranks import main_run
from planner.pipeline_ilp.stage_problem import ROUNDING, Assignment, StageProblem

#: By rank, contents and a row in them.
_Chosen = list[tuple[Contents, int]]
#: Boxes that are looked at.
_MOST = 2_000
#: A tail is not halved below this share of the limit.
_NARROW = 1e-5


class _Box(NamedTuple):
    """From and up to which values of L and U (their places among all), and seconds of T."""

    loads: tuple[int, int]
    updates: tuple[int, int]
    tails: tuple[float, float]


class _RankColumns:
    """The contents of one rank one after another, in columns; ``starts``: where those of each number of units begin."""

    def __init__(self, contents: list[Contents]) -> None:
        self.contents = contents
        figures = np.concatenate([each.figures for each in contents])
        self.load, self.fill, self.exposed, self.hides, self.update = (figures[:, place].copy() for place in range(5))
        self.starts = np.cumsum([0, *(len(each.figures) for each in contents[:-1])])

    def within(self, load: float, update: float, tail: float) -> NDArray[np.bool_]:
        """Which contents are in a box."""
        inside = self.load <= load
        inside &= self.update <= update
        inside &= self.exposed <= tail * (1.0 + ROUNDING)
        return inside


class ContentBoxes:
    """Boxes of one problem, whose contents by rank are ``ranks``."""

    def __init__(self, problem: StageProblem, ranks: list[list[Contents]]) -> None:
        run = main_run(problem)
        assert run is not None  # others have no contents
        self.problem, self.ranks, self.run, self.count = problem, ranks, run, problem.runs[run].count
        whole = not SCHEDULES[problem.schedule].splits_backward
        self.times = problem.num_microbatches - (whole and problem.num_ranks > 1)
        first = min(choice.costs.reduce_step for choice in problem.runs_on(problem.ranks[0])[0].choices)
        #: What waits after a whole backward pass is among the fill, and may cover the first reduction.
        self.first = 0.0 if whole else first
        figures = np.concatenate([contents.figures for rank in ranks for contents in rank] or [np.zeros((0, 5))])
        self.loads, self.updates = np.unique(figures[:, LOAD]), np.unique(figures[:, UPDATE])
        self.longest_tail = float(figures[:, EXPOSED].max(initial=0.0))
        self.columns = [_RankColumns(rank) for rank in ranks if rank]
        #: The least sum of φ by the upper corner of a box, which one of its halves has, too.
        self._fills: dict[tuple[int, int, float], float] = {}

    def bound(
        self, offer: Callable[[Assignment], object], target: Callable[[], float], limited: Callable[[], float]
    ) -> float:
        """A lower bound of all assignments of these contents, at least ``target`` unless boxes run out.

        Args:
            offer: told of every assignment on the way that takes less than ``limited`` seconds.
            target: seconds down to which nothing needs to be looked for; asked again after every offer.
            limited: seconds that only assignments of interest beat, asked again before every offer.
        """
        if not all(self.ranks):
            return math.inf

        def offer_faster(chosen: _Chosen) -> None:
            if self._seconds(chosen) < limited():
                offer(tuple(contents.groups(place, self.run) for contents, place in chosen))

        order = itertools.count()
        whole = _Box((0, len(self.loads) - 1), (0, len(self.updates) - 1), (0.0, self.longest_tail))
        heap: list[tuple[float, int, _Box]] = []
        least, boxes = math.inf, [(0.0, whole)]
        for _ in range(_MOST):
            for above, box in boxes:
                bound = max(above, self._bounded(box, offer_faster))
                heapq.heappush(heap, (bound, next(order), box))
            if not heap or heap[0][0] >= target():
                break
            above, _, box = heapq.heappop(heap)
            boxes = [(above, half) for half in self._halves(box, _NARROW * target())]
            if not boxes:
                least = min(least, above)
        else:
            least = min([least, *(above for above, _ in boxes)])
        return min([least, *(bound for bound, _, _ in heap)])

    def _bounded(self, box: _Box, offer: Callable[[_Chosen], None]) -> float:
        """The bound of a box, infinite if it has no assignment."""
        corner = box.loads[1], box.updates[1], box.tails[1]
        if corner not in self._fills:
            load, update = float(self.loads[corner[0]]), float(self.updates[corner[1]])
            self._fills[corner] = self._least_fill(load, update, corner[2], offer)
        tail = max(box.tails[0], self.first)
        least = self.times * float(self.loads[box.loads[0]]) + self._fills[corner]
        return least + tail + float(self.updates[box.updates[0]])

    def _least_fill(self, load: float, update: float, tail: float, offer: Callable[[_Chosen], None]) -> float:
        """The least sum of φ over ranks whose contents are within a box, infinite if there are none such; the
        assignment that has it is offered."""
        sums = [np.full(self.count + 1, math.inf)]
        sums[0][0] = 0.0
        fills: list[tuple[Array, list[float]]] = []
        hidden_before = 0.0
        for rank in self.columns:
            after = np.full(self.count + 1, math.inf)
            within = rank.within(load, update, tail + hidden_before)
            fill = np.where(within, rank.fill, math.inf)
            least = np.minimum.reduceat(fill, rank.starts).tolist()
            for contents, each in zip(rank.contents, least):
                before = sums[-1][: self.count + 1 - contents.units]
                if each < math.inf:
                    np.minimum(after[contents.units :], before + each, out=after[contents.units :])
            hidden_before += float(np.where(within, rank.hides, 0.0).max())
            sums.append(after)
            fills.append((fill, least))
        total = float(sums[-1][self.count])
        if total < math.inf:
            offer(self._chosen(sums, fills))
        return total

    def _chosen(self, sums: list[Array], fills: list[tuple[Array, list[float]]]) -> _Chosen:
        """By rank, the contents and the row in them that have the least sum of φ."""
        units, chosen = self.count, []
        for before, after, rank, (fill, least) in reversed(list(zip(sums, sums[1:], self.columns, fills))):
            for contents, start, each in zip(rank.contents, rank.starts, least):
                if contents.units <= units and before[units - contents.units] + each == after[units]:
                    chosen.append((contents, int(fill[start : start + len(contents.figures)].argmin())))
                    units -= contents.units
                    break
        return chosen[::-1]

    def _seconds(self, chosen: _Chosen) -> float:
        """The least seconds of a step of these contents, as the formula above has them."""
        rows = [contents.figures[place].tolist() for contents, place in chosen]
        tail, hidden = self.first, 0.0
        for row in rows:
            tail = max(tail, row[EXPOSED] - hidden)
            hidden += row[HIDES]
        largest = self.times * max(row[LOAD] for row in rows) + max(row[UPDATE] for row in rows)
        return largest + sum(row[FILL] for row in rows) + tail

    def _halves(self, box: _Box, narrow: float) -> list[_Box]:
        """The box in two, where that may raise the bound most; none if it is as narrow as can be."""
        (first, last), (low, high), (short, long) = box
        widths = (
            self.times * float(self.loads[last] - self.loads[first]),
            float(self.updates[high] - self.updates[low]),
            long - short if long - short > narrow else 0.0,
        )
        if not any(widths):
            return []
        if widths[0] == max(widths):
            middle = (first + last) // 2
            return [box._replace(loads=(first, middle)), box._replace(loads=(middle + 1, last))]
        if widths[1] == max(widths):
            middle = (low + high) // 2
            return [box._replace(updates=(low, middle)), box._replace(updates=(middle + 1, high))]
        half = (short + long) / 2
        return [box._replace(tails=(short, half)), box._replace(tails=(half, long))]
