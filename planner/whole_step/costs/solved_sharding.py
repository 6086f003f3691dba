"""A sharding program solved: the best assignment, and what is proved of its objective."""

from __future__ import annotations

from dataclasses import dataclass

from planner.sharding_ilp.assignment import Assignment, complete, read_choices, used_steps
from planner.sharding_ilp.lattice import Lattices
from planner.sharding_ilp.sharding_program import ShardingIlp
from planner.solvers.linear import OPTIMAL, LinearProgram, LinearSolution
from planner.solvers.nearly_integral import solve_nearly_integral
from planner.solvers.pulp_solver import short_name


@dataclass(frozen=True)
class SolvedSharding:
    """The best assignment of a program, how much less its objective may be, and the bound of that."""

    ilp: ShardingIlp
    assignment: Assignment
    slack: float
    bound: float


def solved_sharding(
    ilp: ShardingIlp, lattices: Lattices, solver: str, *, follows_steps: bool = False
) -> SolvedSharding | None:
    """The best assignment, None if there is none.

    ``follows_steps``: values are converted by the program's steps alone, not by those of least seconds.
    """
    solution = _solution(ilp.program, solver)
    if solution.values is None:
        return None
    steps = used_steps(ilp, solution.values) if follows_steps else None
    assignment = complete(
        ilp.problem, read_choices(ilp, solution.values), lattices, allowed=steps, requests=ilp.requests
    )
    slack = 0.0 if solution.status == OPTIMAL else ilp.program.cost_of(solution.values) - solution.bound
    return None if assignment is None else SolvedSharding(ilp, assignment, slack, solution.bound)


def _solution(program: LinearProgram, solver: str) -> LinearSolution:
    """The best solution.

    Raises:
        ValueError: if the solver gives up.
    """
    solution = solve_nearly_integral(program, solver=solver)
    if solution.values is None and not solution.infeasible:
        raise ValueError(f"{short_name(solver)} found no sharding ({solution.status}): choose another solver")
    return solution
