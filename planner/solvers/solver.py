"""Run a linear program: by HiGHS, or by another solver that PuLP calls (``pulp_solver``).

What stops a solver early is an *effort* (``linear.SECOND``), which is the same on every machine and however busy it is:
simplex iterations of a linear program; of an integer one, how often branch and bound comes to where it may be
interrupted. A time limit beside it is for the clock that the user sees.

HiGHS is given the arrays directly: for 31,000 variables building the program in PuLP takes 0.46 s where HiGHS builds
and solves it in 0.64 s, and PuLP passes on neither the bound nor the gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.solvers.linear import EFFORT_LIMIT, OPTIMAL, TIME_LIMIT, LinearProgram, LinearSolution
from planner.solvers.pulp_solver import HIGHS, solve_with_pulp

#: Relative gap at which a plan counts as optimal.
RELATIVE_GAP = 1e-7
#: HiGHS' heuristics that solve smaller integer programs at the root: the relaxation is so nearly integral that
#: branching finds the same plan in a tenth of the time (Llama-3-8B in 16 GiB: 10 s with these off, 89 s with them on).
SLOW_HEURISTICS = ("mip_heuristic_run_rins", "mip_heuristic_run_rens", "mip_heuristic_run_root_reduced_cost")
#: Simplex iterations that take about as long as branch and bound between two points where it may be interrupted,
#: at the root and below it.
ROOT, NODE = 1000.0, 100.0
#: The largest limit on iterations or nodes that solvers accept.
MOST = 2**31 - 1
#: The largest cost is scaled to this, so that seconds (1e-6 …) stand well above the solver's tolerances.
LARGEST_COST = 1e5


def solve(
    program: LinearProgram,
    *,
    time_limit: float = math.inf,
    effort: float = math.inf,
    solver: str = HIGHS,
    gap: float = RELATIVE_GAP,
    cutoff: float | None = None,
    start: Mapping[int, float] | None = None,
    presolve: bool = True,
) -> LinearSolution:
    """Solve ``program`` by ``solver``, a name of PuLP's (``pulp_solver.solver_named``).

    Args:
        time_limit: seconds.
        effort: simplex iterations × entries, or what takes about as long.
        gap: relative gap at which a solution counts as optimal.
        cutoff: only solutions with a smaller objective are wanted; without one the program comes back as infeasible
            (HiGHS only).
        start: column → value of a known solution to begin with; columns may be left out (HiGHS only).
        presolve: whether the program is reduced first (HiGHS only), which a linear program of flows takes longer for
            than to be solved as it is.

    Raises:
        ValueError: if a solver other than HiGHS fails.
    """
    scale = cost_scale(program)
    if solver != HIGHS:
        return _solve_by_another(program, solver, scale=scale, time_limit=time_limit, effort=effort, gap=gap)
    return _solve_highs(
        program,
        scale=scale,
        time_limit=time_limit,
        effort=effort,
        gap=gap,
        cutoff=cutoff,
        start=start,
        presolve=presolve,
    )


def cost_scale(program: LinearProgram) -> float:
    """By what costs are multiplied for a solver."""
    import numpy as np

    return LARGEST_COST / (float(np.abs(program.costs).max(initial=0.0)) or 1.0)


def _solve_by_another(
    program: LinearProgram, solver: str, *, scale: float, time_limit: float, effort: float, gap: float
) -> LinearSolution:
    """HiGHS bounds the program by its linear relaxation, and has to agree where a solver says that nothing fits."""
    relaxed = solve(program.relaxed(), time_limit=time_limit)
    if relaxed.infeasible:
        return relaxed
    nodes = effort / max(1, program.num_entries) / ROOT
    solution = solve_with_pulp(
        program, solver, relaxed=relaxed, scale=scale, time_limit=time_limit, nodes=nodes, gap=gap
    )
    if not solution.infeasible:
        return solution
    anything = replace(program, costs=[0.0] * program.num_variables)
    return replace(solution, infeasible=solve(anything, time_limit=time_limit, effort=effort).infeasible)


def _solve_highs(
    program: LinearProgram,
    *,
    scale: float,
    time_limit: float,
    effort: float,
    gap: float,
    cutoff: float | None,
    start: Mapping[int, float] | None,
    presolve: bool,
) -> LinearSolution:
    import highspy
    import numpy as np

    is_integer = any(program.integers)
    highs = highspy.Highs()
    options: dict[str, Any] = {
        "output_flag": False, "random_seed": 0, "threads": 1, "parallel": "off", "time_limit": float(time_limit),
        "mip_rel_gap": gap, "mip_abs_gap": 0.0, "presolve": "choose" if presolve else "off",
    }  # fmt: skip
    if cutoff is not None:
        options["objective_bound"] = cutoff * scale
    for name, value in options.items():
        highs.setOptionValue(name, value)
    for name in SLOW_HEURISTICS:
        highs.setOptionValue(name, False)
    entries = max(1, program.num_entries)
    if is_integer:
        branching = _Branching(effort / entries)
        highs.cbMipInterrupt.subscribe(branching.count)
    else:
        highs.setOptionValue("simplex_iteration_limit", int(min(MOST, 1 + effort / entries)))
    pass_model(highs, program, scale)
    if start is not None:
        columns, values = np.array(list(start), dtype=np.int32), np.array(list(start.values()), dtype=float)
        highs.setSolution(len(start), columns, values)
    highs.run()
    status = highs.getModelStatus()
    info = highs.getInfo()
    statuses = {
        highspy.HighsModelStatus.kOptimal: OPTIMAL,
        highspy.HighsModelStatus.kTimeLimit: TIME_LIMIT,
        highspy.HighsModelStatus.kInterrupt: EFFORT_LIMIT,
        highspy.HighsModelStatus.kIterationLimit: EFFORT_LIMIT,
    }
    has_solution = info.primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible)
    infeasible = status in (
        highspy.HighsModelStatus.kInfeasible,
        highspy.HighsModelStatus.kUnboundedOrInfeasible,
        highspy.HighsModelStatus.kObjectiveBound,
    )
    optimal = status == highspy.HighsModelStatus.kOptimal  # the objective of a stopped simplex run is no bound
    bound = info.mip_dual_bound if is_integer else info.objective_function_value if optimal else 0.0
    return LinearSolution(
        values=list(highs.getSolution().col_value) if has_solution else None,
        bound=bound / scale if math.isfinite(bound) else 0.0,
        status=statuses.get(status) or highs.modelStatusToString(status).lower(),
        solver=f"HiGHS {highs.version()}",
        infeasible=infeasible,
        effort=entries * (branching.iterations if is_integer else info.simplex_iteration_count),
    )


def pass_model(highs: Any, program: LinearProgram, scale: float) -> None:
    """Hand ``highs`` the program's arrays, costs times ``scale``; copied whole, since one entry at a time takes longer
    than solving."""
    import highspy
    import numpy as np

    continuous, integer = int(highspy.HighsVarType.kContinuous), int(highspy.HighsVarType.kInteger)
    kinds = np.full(program.num_variables, continuous, dtype=np.int32)
    if any(program.integers):
        kinds[np.asarray(program.integers, dtype=bool)] = integer
    bounds = program.bounds()
    highs.passModel(
        program.num_variables,
        program.num_constraints,
        program.num_entries,
        int(highspy.MatrixFormat.kRowwise),
        int(highspy.ObjSense.kMinimize),
        0.0,
        np.asarray(program.costs, dtype=np.float64) * scale,
        np.zeros(program.num_variables),
        bounds.uppers,
        bounds.row_lowers,
        bounds.row_uppers,
        np.asarray(program.starts),
        np.asarray(program.columns),
        np.asarray(program.coefficients),
        kinds,
    )


@dataclass
class _Branching:
    """Interrupts branch and bound after ``limit`` iterations, counted as in ``count``."""

    limit: float
    iterations: float = 0.0

    def count(self, event: Any) -> None:
        """Branch and bound may be interrupted: HiGHS asks at the same points however long it took."""
        self.iterations += ROOT if event.data_out.mip_node_count <= 1 else NODE
        if self.iterations >= self.limit:
            event.interrupt()
