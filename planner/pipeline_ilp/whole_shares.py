"""A lower bound of a stage program from whole units on each rank: branch and bound over how many each rank holds.

The relaxation gives some ranks a fraction of a unit less than they can be spared, so that all are less busy than any
assignment lets them be, and no path through the order is long. With whole units few ranks are spared one, and the paths
count. Llama-3.1-405B in a V of 32 ranks with about four layers each takes 60 linear programs of a few iterations;
branch and bound over how many layers of each chunk run as which choice, a thousand variables, did not prove that in 500
times the effort.

A node says how many units each rank holds at least and at most; its relaxation, with the longest paths of its solution,
bounds all assignments in it. Where all ranks hold whole units, chunks are to. Nodes are taken least bound first, so
that the node taken bounds the program. Branching ends when that is beyond what is to be proved, or when everything is
whole in a node that is not. What the ranks hold by ``ranks.share_out`` is tried first: if that node is not beyond it,
nothing else is.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from planner.pipeline_ilp.path_rows import add_longest_path
from planner.pipeline_ilp.ranks import Shares
from planner.pipeline_ilp.stage_program import StageProgram
from planner.solvers.linear import SECOND

#: What all linear programs of one bound may take together; beyond that a stage program is solved.
_EFFORT = 4 * SECOND
#: Nodes after which a bound that is not proved will not be soon: proofs take a few, up to 60 for 32 ranks.
_MOST_NODES = 64
#: Units this near to a whole number are whole.
_WHOLE = 1e-6
#: How often the relaxation of one node is solved at most, each time with one more path.
_PATHS = 10


@dataclass(order=True)
class _Node:
    bound: float
    order: int
    rows: dict[int, tuple[float, float]] = field(compare=False)
    #: The row whose units are to be whole, and how many they are; None if all are.
    split: tuple[int, float] | None = field(compare=False)


def bound_of_whole_shares(stage: StageProgram, shares: Shares, target: float, *, deadline: float) -> float:
    """A lower bound in seconds of a program with the ``tables`` of ``shares``; 0 where no paths lengthen its step.

    Args:
        target: the bound that is to be proved.
        deadline: of ``time.monotonic``, by which branching stops whatever its effort.
    """
    if stage.pipeline is None or len(stage.share_rows) < stage.problem.num_ranks:
        return 0.0
    branching = _ShareBranching(stage, target / stage.second - stage.constant, deadline)
    return (branching.bound(shares) + stage.constant) * stage.second


class _ShareBranching:
    """Branch and bound over the units of ranks; ``target`` is in the program's unit, without its constant."""

    def __init__(self, stage: StageProgram, target: float, deadline: float) -> None:
        self.stage, self.target, self.effort, self.deadline = stage, target, _EFFORT, deadline
        self.relaxation = stage.relaxation
        self.order = itertools.count()
        self.stopped, self.num_nodes = False, 0

    def bound(self, shares: Shares) -> float:
        """A lower bound of the program, ``target`` if that is proved; 0 if ``shares`` show that it cannot be."""
        table_rows = self.stage.share_rows
        guess = {table_rows[rank]: (float(units), float(units)) for rank, units in enumerate(shares.units)}
        if self._bounded(guess) is not None or self.stopped:
            return 0.0
        root = self._bounded({})
        heap = [] if root is None else [root]
        while heap and not self.stopped:
            if self.num_nodes + 2 * len(heap) > _MOST_NODES:
                return heap[0].bound  # each open node has two halves at least: they cannot all be closed
            node = heapq.heappop(heap)
            if node.split is None:
                return node.bound
            for rows in self._halves(node):
                half = self._bounded(rows)
                if half is not None:
                    heapq.heappush(heap, half)
                elif self.stopped:
                    return node.bound
        return self.target if not self.stopped else 0.0

    def _bounded(self, rows: dict[int, tuple[float, float]]) -> _Node | None:
        """The node of these rows, None if its bound is beyond the target or nothing is in it."""
        self.num_nodes += 1
        if self.num_nodes > _MOST_NODES:
            self.stopped = True
            return None
        for _ in range(_PATHS):
            seconds = max(0.0, self.deadline - time.monotonic())
            solution = self.relaxation.solve(rows, effort=self.effort, time_limit=seconds)
            self.effort = max(0.0, self.effort - solution.effort)
            if solution.infeasible:
                return None
            if solution.values is None:
                self.stopped = True
                return None
            if solution.bound >= self.target:
                return None
            values = solution.values
            node = _Node(solution.bound, next(self.order), rows, self._split(values))
            shares_whole = node.split is None or node.split[0] not in self.stage.share_rows
            if not shares_whole or not add_longest_path(self.stage, values):
                break
        return node

    def _split(self, values: Sequence[float]) -> tuple[int, float] | None:
        """The row whose units are farthest from whole, one of a rank if any is, and how many they are."""
        for rows in (self.stage.share_rows, self.stage.chunk_rows):
            units = {row: self._units(row, values) for row in rows}
            row = max(units, key=lambda each: abs(units[each] - round(units[each])))
            if abs(units[row] - round(units[row])) > _WHOLE:
                return row, units[row]
        return None

    def _units(self, row: int, values: Sequence[float]) -> float:
        program = self.stage.program
        return sum(values[program.columns[at]] for at in range(program.starts[row], program.starts[row + 1]))

    def _halves(self, node: _Node) -> Iterator[dict[int, tuple[float, float]]]:
        """The rows of the two nodes that replace one."""
        assert node.split is not None
        program, (row, units) = self.stage.program, node.split
        least, most = node.rows.get(row, (program.row_lowers[row], program.row_uppers[row]))
        yield {**node.rows, row: (least, float(math.floor(units)))}
        yield {**node.rows, row: (float(math.ceil(units)), most)}
