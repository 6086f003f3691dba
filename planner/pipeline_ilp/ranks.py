"""Each rank by itself: how fast it can run n layers within its memory, and how many layers it should hold.

If a model is one long run of equal units, with at most a single unit before and after it, any number of units for each
chunk is a cut. Then only the total number of units couples the ranks. For every rank a table gives the least load
against the number of units, exact in whole units and memory. Handing out units one at a time to the rank whose load
stays least gives the least bottleneck: a proved bound of the load, and nearly always an assignment that meets it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.pipeline_ilp.crossings import received
from planner.pipeline_ilp.fronts import DualWeights, Front
from planner.pipeline_ilp.peak_levels import peak_levels
from planner.pipeline_ilp.stage_problem import Assignment, StageProblem
from planner.pipeline_ilp.stage_program import Linear, StageProgram, chunks_of

Array = NDArray[np.float64]


def main_run(problem: StageProblem) -> int | None:
    """The index of the long run, if the model is one long run with at most a single unit at either end."""
    longest = max(range(len(problem.runs)), key=lambda run: problem.runs[run].count)
    ends = [run.count for index, run in enumerate(problem.runs) if index != longest]
    if longest > 1 or len(problem.runs) - longest > 2 or any(count > 1 for count in ends):
        return None
    return longest


class RankTable:
    """Least load of one rank against the number of units of the long run that it holds, computed on demand."""

    def __init__(
        self, problem: StageProblem, rank: int, chunks: list[int], run: int, weights: DualWeights, received: float
    ) -> None:
        self.problem, self.run, self.seconds = problem, run, weights.unit
        self.chunks, self.received = chunks, received
        held = problem.in_flight
        spare = min(self.chunks, key=lambda chunk: held[chunk])
        ends = [(0, 0)] * (run > 0) + [(problem.num_chunks - 1, len(problem.runs) - 1)] * (run < len(problem.runs) - 1)
        ends_on_rank = [end for end in ends if end[0] in self.chunks]
        bare = [chunk for chunk in self.chunks if chunk not in {chunk for chunk, _ in ends_on_rank}]
        self.least = len(bare)
        self.runs = problem.runs_on(rank)
        self.spare_slot = (spare, run)
        #: The units in the order in which they are placed, of which ``least`` are of the long run.
        self.slots = [*ends_on_rank, *((chunk, run) for chunk in bare)]
        self.levels = peak_levels(
            self.runs, [*self.slots, self.spare_slot], weights, held=held, limit=problem.memory[rank]
        )
        #: By level, the least seconds and the front of ``least`` units and of more, as far as they have been asked for.
        self.least_seconds = [[level.least_seconds(self.slots)] for level in self.levels]
        self.fronts: list[list[Front]] = [[] for _ in self.levels]
        self.loads: dict[int, float] = {}

    def _front(self, place: int, units: int) -> Front:
        """The front of ``units`` units at one of ``levels``."""
        level, fronts = self.levels[place], self.fronts[place]
        if not fronts:
            fronts.append(level.front(self.slots))
        while len(fronts) <= units - self.least:
            fronts.append(level.after(fronts[-1], self.spare_slot))
        return fronts[units - self.least]

    def _least_seconds(self, place: int, units: int) -> float:
        """Seconds of ``units`` units at one of ``levels``, whatever their bytes."""
        least = self.least_seconds[place]
        while len(least) <= units - self.least:
            least.append(self.levels[place].longer(least[-1], self.spare_slot))
        return least[units - self.least]

    def load(self, units: int) -> float:
        """Lower bound of the rank's load with ``units`` units, in seconds; infinite if they do not fit in memory."""
        if units not in self.loads:
            load = math.inf
            for place in reversed(range(len(self.levels))):
                if self._least_seconds(place, units) < load:
                    front = self._front(place, units)
                    load = min([load, *(front.seconds[:1] - front.lost).tolist()])
            self.loads[units] = load + self.received
        return self.loads[units]

    def assigned(self, units: int) -> list[tuple[int, int, int]]:
        """The (chunk, run, choice) of every unit in the fastest placement of ``units`` units."""
        best: Front | None = None
        for place in reversed(range(len(self.levels))):
            if best is None or self._least_seconds(place, units) <= best.seconds[0]:
                front = self._front(place, units)
                if len(front.seconds) and (best is None or front.seconds[0] <= best.seconds[0]):
                    best = front
        assert best is not None  # the load of so many units is finite
        return best.units()

    def spread(self, units: int) -> list[tuple[int, int, int]]:
        """The same with the units of the long run spread over the rank's chunks, each onto the least loaded one."""
        placed = self.assigned(units)
        ends = [unit for unit in placed if unit[1] != self.run]
        seconds = dict.fromkeys(self.chunks, 0.0)
        for chunk, run, choice in ends:
            seconds[chunk] += self.seconds(self.runs[run].choices[choice].costs)
        spread: list[tuple[int, int, int]] = []
        for _, run, choice in (unit for unit in placed if unit[1] == self.run):
            empty = [chunk for chunk in self.chunks if not any(unit[0] == chunk for unit in (*ends, *spread))]
            chunk = min(empty or self.chunks, key=lambda place: seconds[place])
            seconds[chunk] += self.seconds(self.runs[run].choices[choice].costs)
            spread.append((chunk, run, choice))
        return ends + spread


@dataclass(frozen=True)
class Shares:
    """How many units of the long run each rank holds, and each rank's table of loads.

    ``load`` is the least possible bottleneck, in the seconds that the tables count.
    """

    tables: list[RankTable]
    units: list[int]
    load: float

    @property
    def assignment(self) -> Assignment:
        """The assignment of the shares, with every free unit in the chunk where it takes the least memory."""
        return self._grouped([table.assigned(units) for table, units in zip(self.tables, self.units)])

    @property
    def even(self) -> Assignment:
        """The same with each rank's chunks balanced, as interleaved schedules run best; it may take more memory."""
        return self._grouped([table.spread(units) for table, units in zip(self.tables, self.units)])

    def _grouped(self, ranks: Sequence[Sequence[tuple[int, int, int]]]) -> Assignment:
        counts: list[dict[tuple[int, int], int]] = [{} for table in self.tables for _ in table.chunks]
        for placed in ranks:
            for chunk, run, choice in placed:
                counts[chunk][run, choice] = counts[chunk].get((run, choice), 0) + 1
        return tuple(
            tuple((run, choice, count) for (run, choice), count in sorted(groups.items())) for groups in counts
        )


def share_out(problem: StageProblem, weights: DualWeights) -> Shares | None:
    """Hand out the units of the long run to minimise the largest load, then to shorten the sum of loads.

    Args:
        weights: seconds that a unit and a received boundary count for.

    Returns:
        None if the model is not one long run. An infinite load means that the model does not fit in memory.
    """
    run = main_run(problem)
    if run is None:
        return None
    places = zip(chunks_of(problem), received(problem, weights.receive))
    tables = [RankTable(problem, rank, chunks, run, weights, seconds) for rank, (chunks, seconds) in enumerate(places)]
    units = [table.least for table in tables]
    rest = problem.runs[run].count - sum(units)
    if rest < 0:
        return None
    heap = [(table.load(count + 1), rank) for rank, (table, count) in enumerate(zip(tables, units))]
    heapq.heapify(heap)
    load = max(table.load(count) for table, count in zip(tables, units))
    for _ in range(rest):
        following, rank = heapq.heappop(heap)
        load = max(load, following)
        if math.isinf(load):
            break
        units[rank] += 1
        heapq.heappush(heap, (tables[rank].load(units[rank] + 1), rank))
    if math.isfinite(load):
        _shift(tables, units, load)
    return Shares(tables, units, load)


def _shift(tables: Sequence[RankTable], units: list[int], load: float) -> None:
    """Move units between ranks while that shortens the sum of loads and keeps each within ``load``."""
    limit = load * (1 + 1e-12)
    for _ in range(sum(units)):
        gains = [
            table.load(count) - table.load(count - 1) if count > table.least else -math.inf
            for table, count in zip(tables, units)
        ]
        costs = [
            table.load(count + 1) - table.load(count) if table.load(count + 1) <= limit else math.inf
            for table, count in zip(tables, units)
        ]
        giver, taker = int(np.argmax(gains)), int(np.argmin(costs))
        if giver == taker or gains[giver] <= costs[taker] * (1 + 1e-9):
            return
        units[giver] -= 1
        units[taker] += 1


def add_tables(stage: StageProgram, shares: Shares, largest_load: float) -> None:
    """(tables): valid inequalities, for steps in which no load exceeds ``largest_load`` seconds.

    A rank holds no more units than its table has within that load, and its load is above the convex hull of the table.
    """
    problem = stage.problem
    for table, load in zip(shares.tables, stage.loads):
        held = Linear()
        for chunk in table.chunks:
            held.add(stage.units(chunk, table.run))
        points = []
        for units in range(table.least, problem.runs[table.run].count + 1):
            if math.isinf(table.load(units)) or table.load(units) > largest_load * (1 + 1e-9):
                break
            points.append((float(units), table.load(units) / stage.second))
        if not points:
            continue
        stage.share_rows.append(stage.row(held, upper=points[-1][0]))
        for (left_units, low), (right_units, high) in itertools.pairwise(_lower_hull(points)):
            slope = (high - low) / (right_units - left_units)
            stage.row(Linear().add(load).add(held, -slope), lower=low - slope * left_units)


def _lower_hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    return hull
