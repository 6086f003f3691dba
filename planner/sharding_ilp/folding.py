"""How many copies of a repeated block are solved as one.

Folding every copy into one makes depth cost nothing, but forbids what differs from copy to copy, such as columns and
rows that alternate. The relaxation of ``unfolded`` bounds what that may cost. Where it may cost much, two, three and
four copies are tried as one, then (if the program stays small) every copy by itself; the first that comes near the
bound is taken. Sizes and bounds decide, so that the same inputs give the same plan; limits only stop the search.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from passes.repeats.repeated_blocks import BlockRun, grouped
from planner.sharding_ilp.assignment import Assignment
from planner.sharding_ilp.lattice import Lattices
from planner.sharding_ilp.sharding_program import ShardingIlp
from planner.sharding_ilp.unfolded import unfolded_relaxation
from planner.solvers.limits import Limits
from planner.solvers.linear import OPTIMAL, LinearSolution
from planner.solvers.solver import RELATIVE_GAP, solve

#: Within this share of the bound a plan whose copies are alike is preferred to a longer program.
NEAR_BOUND = 1e-3
#: Numbers of copies that are tried as one.
PERIODS = (2, 3, 4)
#: Programs of more variables than this are not tried.
MAX_VARIABLES = 30_000
#: Relative improvement that a plan needs to replace one that repeats shorter blocks.
BETTER = 1e-6
#: Status of a plan that is proved best among those with equal copies, but not among those with unequal copies.
BEST_OF_ALIKE = "optimal with alike copies"


@dataclass(frozen=True)
class Solved:
    """A program, its solution, and what that decides.

    ``bound`` is a lower bound of all plans of the graph, whether or not their copies are alike.
    """

    ilp: ShardingIlp
    solution: LinearSolution
    assignment: Assignment
    bound: float = 0.0

    @property
    def gap(self) -> float:
        """How far the plan may be from the best, relative to it."""
        seconds = self.assignment.seconds
        return max(seconds - self.bound, 0.0) / seconds if seconds else 0.0

    @property
    def status(self) -> str:
        is_folded = self.solution.status == OPTIMAL and self.gap > 10 * RELATIVE_GAP
        return BEST_OF_ALIKE if is_folded else self.solution.status


#: Solves the program with these runs folded, within limits; None if it has no solution.
SolveFolded = Callable[[tuple[BlockRun, ...], Limits], Solved | None]


def unfolded_bound(ilp: ShardingIlp, lattices: Lattices, *, memory_limit: float | None, limits: Limits) -> float:
    """A lower bound in seconds of all plans, those whose copies differ included; 0 if a limit is reached."""
    program = unfolded_relaxation(ilp.problem, lattices, memory_limit=memory_limit)
    solution = solve(program, time_limit=limits.seconds, effort=limits.effort_on(program), presolve=False)
    return max(solution.bound, 0.0) if solution.status == OPTIMAL else 0.0


def best_folding(first: Solved, runs: tuple[BlockRun, ...], solve_folded: SolveFolded, *, limits: Limits) -> Solved:
    """``first`` (every copy alike), or a better solution with longer blocks; ``bound`` stays the best one proved."""
    best, bound = first, first.bound
    ends, effort = time.monotonic() + limits.seconds, limits.effort
    for coarser in _coarser(runs, first.ilp.program.num_variables):
        left = Limits(ends - time.monotonic(), effort)
        if best.gap <= NEAR_BOUND or left.seconds <= 0 or left.effort <= 0:
            break
        trial = solve_folded(coarser, left)
        if trial is None:
            continue
        effort -= trial.solution.effort
        if not coarser:
            bound = max(bound, trial.solution.bound)
        if trial.assignment.seconds < best.assignment.seconds * (1 - BETTER):
            best = trial
        best = Solved(best.ilp, best.solution, best.assignment, bound)
    return best


def _coarser(runs: tuple[BlockRun, ...], num_variables: int) -> Iterator[tuple[BlockRun, ...]]:
    """The runs with several copies as one, where that leaves blocks and a small program; at last none at all."""
    longest = max(run.num_copies for run in runs)
    for period in PERIODS:
        groups = tuple(group for run in runs if (group := grouped(run, period)) is not None)
        if groups and num_variables * (period + 1) <= MAX_VARIABLES:
            yield groups
    if num_variables * longest <= MAX_VARIABLES:
        yield ()
