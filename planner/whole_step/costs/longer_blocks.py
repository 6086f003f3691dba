"""Where copies of a repeated block should differ (columns and rows that alternate): several copies as one block.

A search of steps splits all copies of a block alike, and its certificate is of such plans. What that may cost is
bounded by the relaxation of ``planner.sharding_ilp.unfolded`` for each of the best candidates; where it is more than a
little, and the programs stay small, two, three and four copies are planned as one block, as on a given mesh
(``planner.sharding_ilp.folding``).
"""

from __future__ import annotations

from collections.abc import Iterator

from passes.repeats.repeated_blocks import BlockRun, grouped
from planner.sharding_ilp.folding import MAX_VARIABLES, NEAR_BOUND, PERIODS
from planner.sharding_ilp.lattice import Lattices
from planner.sharding_ilp.unfolded import unfolded_relaxation
from planner.solvers.linear import OPTIMAL
from planner.solvers.solver import solve
from planner.whole_step.best_first import Search
from planner.whole_step.costs.level_one import Sharded
from planner.whole_step.result.outcome import Outcome


class UnlikeCopies:
    """What copies that differ may gain, by sharding (each looked at once)."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.num_variables = 0
        self._least: dict[int, tuple[Sharded, float]] = {}

    def least_seconds(self, sharded: Sharded) -> float:
        """A lower bound of a micro-batch's seconds under any sharding of this cut, copies alike or not."""
        if id(sharded) not in self._least:
            self._least[id(sharded)] = sharded, self._relaxed(sharded)
        return self._least[id(sharded)][1]

    def _relaxed(self, sharded: Sharded) -> float:
        problem, pricing = sharded.variant.problem, sharded.variant.pricing
        if not problem.runs or sharded.variant.cut.context * sharded.variant.cut.tensor == 1:
            return sharded.seconds
        program = unfolded_relaxation(problem, Lattices(pricing), memory_limit=None)
        self.num_variables = max(self.num_variables, program.num_variables)
        solution = solve(program, presolve=False)
        return min(sharded.seconds, max(0.0, solution.bound)) if solution.status == OPTIMAL else 0.0

    def may_gain(self, outcome: Outcome) -> bool:
        """Whether some solution, its copies unlike, may be clearly better than the best is."""
        best = outcome.solutions[0].seconds
        for solution in outcome.solutions:
            sharded = self.search.sharded(solution.candidate)
            if sharded is None:
                continue
            saved = sharded.seconds - self.least_seconds(sharded)
            if saved > NEAR_BOUND * sharded.seconds and solution.seconds - solution.candidate.bound(saved) < best:
                return True
        return False


def longer_blocks(runs: tuple[BlockRun, ...], num_variables: int) -> Iterator[tuple[BlockRun, ...]]:
    """``runs`` with two, three and four copies as one, where that leaves blocks and a small program."""
    for period in PERIODS:
        groups = tuple(group for run in runs if (group := grouped(run, period)) is not None)
        if groups and num_variables * period <= MAX_VARIABLES:
            yield groups
