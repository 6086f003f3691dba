"""Integer programs whose linear relaxation is nearly always integral, as those of flows are."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.solvers.linear import OPTIMAL, LinearProgram, LinearSolution
from planner.solvers.pulp_solver import HIGHS
from planner.solvers.solver import solve

#: A value counts as integral if it is nearer than this to an integer.
INTEGRAL = 1e-6


def solve_nearly_integral(
    program: LinearProgram, *, time_limit: float = math.inf, effort: float = math.inf, solver: str = HIGHS
) -> LinearSolution:
    """The best solution: HiGHS solves the relaxation in a fifth of the time, and then branches only if it must.

    Args and errors: those of ``planner.solvers.solver.solve``.
    """
    if solver == HIGHS:
        relaxed = solve(program.relaxed(), time_limit=time_limit, effort=effort, presolve=False)
        if relaxed.infeasible:
            return relaxed
        if relaxed.status == OPTIMAL and relaxed.values is not None and not _is_fractional(program, relaxed.values):
            return relaxed
    return solve(program, time_limit=time_limit, effort=effort, solver=solver)


def _is_fractional(program: LinearProgram, values: Sequence[float]) -> bool:
    import numpy as np

    integers = np.array(values)[np.array(program.integers, dtype=bool)]
    return bool((np.abs(integers - integers.round()) > INTEGRAL).any())
