"""Run a linear program: HiGHS by default, CBC (through PuLP) where HiGHS is missing.

What stops a solver early is an *effort* (``linear.SECOND``), which is the same on every machine and however busy it is:
simplex iterations of a linear program; of an integer one, how often branch and bound comes to where it may be
interrupted. A time limit beside it is for the clock that the user sees.

HiGHS is given the arrays directly: for 31,000 variables building the program in PuLP takes 0.46 s where HiGHS builds
and solves it in 0.64 s, and PuLP passes on neither the bound nor the gap.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.search.linear import EFFORT_LIMIT, OPTIMAL, TIME_LIMIT, LinearProgram, Solution

#: Relative gap at which a plan counts as optimal.
RELATIVE_GAP = 1e-7
#: HiGHS' heuristics that solve smaller integer programs at the root: the relaxation is so nearly integral that
#: branching finds the same plan in a tenth of the time (Llama-3-8B in 16 GiB: 10 s with these off, 89 s with them on).
SLOW_HEURISTICS = ("mip_heuristic_run_rins", "mip_heuristic_run_rens", "mip_heuristic_run_root_reduced_cost")
#: Simplex iterations that take about as long as branch and bound between two points where it may be interrupted,
#: at the root and below it.
ROOT, NODE = 1000.0, 100.0
#: The most iterations or nodes that solvers take for a limit.
MOST = 2**31 - 1
#: The largest cost is scaled to this, so that seconds (1e-6 …) stand well above the solver's tolerances.
LARGEST_COST = 1e5


def solve(
    program: LinearProgram,
    *,
    time_limit: float = math.inf,
    effort: float = math.inf,
    solver: str | None = None,
    gap: float = RELATIVE_GAP,
    cutoff: float | None = None,
    start: Mapping[int, float] | None = None,
    presolve: bool = True,
) -> Solution:
    """Solve ``program`` with ``"highs"``, ``"cbc"`` or (None) whichever there is.

    Args:
        time_limit: seconds.
        effort: simplex iterations × entries, or what takes about as long.
        gap: relative gap at which a solution counts as optimal.
        cutoff: only solutions with a smaller objective are wanted; without one the program comes back as infeasible.
        start: column → value of a known solution to begin with; columns may be left out (HiGHS only).
        presolve: whether the program is reduced first (HiGHS only), which a linear program of flows takes longer for
            than to be solved as it is.

    Raises:
        ValueError: for an unknown solver name.
    """
    if solver not in (None, "highs", "cbc"):
        raise ValueError(f"unknown solver {solver!r}: expected 'highs' or 'cbc'")
    scale = LARGEST_COST / (max(map(abs, program.costs), default=0.0) or 1.0)
    if solver != "cbc":
        try:
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
        except ImportError:
            if solver == "highs":
                raise
    return _solve_cbc(program, scale=scale, time_limit=time_limit, effort=effort, gap=gap, cutoff=cutoff)


def default_solver() -> str:
    """The name of the solver that ``solve`` takes where none is named."""
    return "HiGHS" if importlib.util.find_spec("highspy") is not None else "CBC"


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
) -> Solution:
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
    highs.passModel(_highs_model(program, scale))
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
    found = info.primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible)
    infeasible = status in (
        highspy.HighsModelStatus.kInfeasible,
        highspy.HighsModelStatus.kUnboundedOrInfeasible,
        highspy.HighsModelStatus.kObjectiveBound,
    )
    optimal = status == highspy.HighsModelStatus.kOptimal  # what simplex has when it is stopped bounds nothing
    bound = info.mip_dual_bound if is_integer else info.objective_function_value if optimal else 0.0
    return Solution(
        values=list(highs.getSolution().col_value) if found else None,
        bound=bound / scale if math.isfinite(bound) else 0.0,
        status=statuses.get(status) or highs.modelStatusToString(status).lower(),
        solver=f"highs {highs.version()}",
        infeasible=infeasible,
        effort=entries * (branching.iterations if is_integer else info.simplex_iteration_count),
    )


def _highs_model(program: LinearProgram, scale: float) -> Any:
    """The program's arrays, costs times ``scale``."""
    import highspy
    import numpy as np

    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = program.num_variables, program.num_constraints
    model.col_cost_ = np.asarray(program.costs) * scale
    model.col_lower_ = np.zeros(program.num_variables)
    model.col_upper_ = np.asarray(program.uppers)
    model.row_lower_, model.row_upper_ = np.asarray(program.row_lowers), np.asarray(program.row_uppers)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.asarray(program.starts, dtype=np.int32)
    model.a_matrix_.index_ = np.asarray(program.columns, dtype=np.int32)
    model.a_matrix_.value_ = np.asarray(program.coefficients)
    if any(program.integers):
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [kinds[integer] for integer in program.integers]
    return model


@dataclass
class _Branching:
    """Interrupts branch and bound after ``limit`` iterations, as it is reckoned here."""

    limit: float
    iterations: float = 0.0

    def count(self, event: Any) -> None:
        """Branch and bound may be interrupted: HiGHS asks at the same points however long it took."""
        self.iterations += ROOT if event.data_out.mip_node_count <= 1 else NODE
        if self.iterations >= self.limit:
            event.interrupt()


def _solve_cbc(
    program: LinearProgram, *, scale: float, time_limit: float, effort: float, gap: float, cutoff: float | None
) -> Solution:
    import pulp

    problem, variables = to_pulp(program, scale=scale)
    if cutoff is not None:
        problem += problem.objective <= cutoff * scale
    nodes = effort / max(1, program.num_entries) / ROOT
    status = problem.solve(
        pulp.PULP_CBC_CMD(
            msg=False,
            threads=1,
            timeLimit=None if math.isinf(time_limit) else time_limit,
            maxNodes=None if math.isinf(nodes) else int(min(MOST, 1 + nodes)),
            gapRel=gap,
            options=["randomSeed 1"],
        )
    )
    found = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    optimal = problem.sol_status == pulp.LpSolutionOptimal
    return Solution(
        values=[variable.value() or 0.0 for variable in variables] if found else None,
        # PuLP does not pass on CBC's bound: without a proof nothing better than zero is known
        bound=pulp.value(problem.objective) / scale if optimal else 0.0,
        status=_cbc_status(pulp.LpStatus[status].lower(), optimal=optimal, effort=effort),
        solver="cbc (pulp " + pulp.__version__ + ")",
        infeasible=status == pulp.LpStatusInfeasible,
    )


def _cbc_status(status: str, *, optimal: bool, effort: float) -> str:
    """PuLP calls a solution optimal, and a program undefined, that a limit stopped CBC at."""
    if optimal:
        return OPTIMAL
    return status if status == "infeasible" else TIME_LIMIT if math.isinf(effort) else EFFORT_LIMIT


def to_pulp(program: LinearProgram, *, scale: float = 1.0) -> tuple[Any, list[Any]]:
    """The program as a ``pulp.LpProblem`` with its variables in column order."""
    import pulp

    problem = pulp.LpProblem("sharding", pulp.LpMinimize)
    variables = [
        pulp.LpVariable(f"v{column}", 0, None if math.isinf(upper) else upper, "Integer" if integer else "Continuous")
        for column, (upper, integer) in enumerate(zip(program.uppers, program.integers))
    ]
    problem += pulp.LpAffineExpression([(v, cost * scale) for v, cost in zip(variables, program.costs)])
    for row, (lower, upper) in enumerate(zip(program.row_lowers, program.row_uppers)):
        start, end = program.starts[row], program.starts[row + 1]
        terms: dict[int, float] = {}
        for column, coefficient in zip(program.columns[start:end], program.coefficients[start:end]):
            terms[column] = terms.get(column, 0.0) + coefficient
        expression = pulp.LpAffineExpression([(variables[column], value) for column, value in terms.items()])
        if lower == upper:
            problem += expression == lower
        else:
            if math.isfinite(lower):
                problem += expression >= lower
            if math.isfinite(upper):
                problem += expression <= upper
    return problem, variables
