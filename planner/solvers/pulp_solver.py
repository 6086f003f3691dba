"""Programs for any solver that PuLP knows, and as LP files.

PuLP passes on neither a solver's dual bound nor what its "optimal" means: some of its interfaces say so of whatever a
limit left. An answer is therefore checked row by row, and its bound is that of the linear relaxation.
"""

from __future__ import annotations

import inspect
import math
import re
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cost_models.files import write_text
from planner.solvers.linear import EFFORT_LIMIT, OPTIMAL, TIME_LIMIT, UNPROVED, LinearProgram, LinearSolution

#: The solver that is called directly, and the default.
HIGHS = "HiGHS"
#: PuLP's names of the solver that users call ``{}``: as it is, then the ways to call it that PuLP tells apart.
SPELLINGS = ("{}", "PULP_{}_CMD", "{}_CMD", "{}_PY")
#: Tolerance of an answer: absolute to integers, relative to the bounds of rows.
TOLERANCE = 1e-5
#: Relative difference at which a cost equals a bound, since numbers pass through text files.
PRECISION = 1e-6
#: The longest variable name that PuLP writes.
LONGEST_NAME = 100


def solver_named(name: str | None) -> str:
    """PuLP's name of the solver that a user calls ``name``, in any case of letters (None: HiGHS).

    Raises:
        ValueError: if PuLP knows no such solver, or it is not installed; the message lists those that are.
    """
    if name is None or str(name).lower() == HIGHS.lower():
        return HIGHS
    import pulp

    available = pulp.listSolvers(onlyAvailable=True)
    spellings = [spelling.format(name).lower() for spelling in SPELLINGS]
    for spelling in spellings:
        for candidate in available:
            if candidate.lower() == spelling:
                return candidate
    is_known = any(candidate.lower() in spellings for candidate in pulp.listSolvers())
    what = "is not installed on this machine" if is_known else "is none that PuLP knows"
    raise ValueError(f"solver {name!r} {what}: expected one of {', '.join(map(short_name, available))}, or install it")


def short_name(solver: str) -> str:
    """What users call a solver: CBC for PULP_CBC_CMD."""
    return solver.removeprefix("PULP_").removesuffix("_CMD").removesuffix("_PY")


def solver_text(solver: str) -> str:
    """A solver as certificates name it, with the version of what calls it."""
    if solver == HIGHS:
        import highspy

        return f"{HIGHS} {highspy.Highs().version()}"
    import pulp

    return f"{short_name(solver)} (PuLP {pulp.__version__}; bounds: linear relaxations by {HIGHS})"


def solve_with_pulp(
    program: LinearProgram,
    solver: str,
    *,
    relaxed: LinearSolution,
    scale: float,
    time_limit: float,
    nodes: float,
    gap: float,
) -> LinearSolution:
    """The checked answer of ``solver`` (PuLP's name), with the bound of the ``relaxed`` program.

    Args:
        scale: factor of the costs that are handed over.
        nodes: of branch and bound, for solvers that take a limit of them; others are stopped by the clock alone.

    Raises:
        ValueError: if the solver fails.
    """
    import pulp

    problem, variables = to_pulp(program, scale=scale)
    options: dict[str, Any] = {"msg": False, "threads": 1, "gapRel": gap}
    if math.isfinite(time_limit):
        options["timeLimit"] = time_limit
    if math.isfinite(nodes):
        options["maxNodes"] = int(nodes) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        named = inspect.signature(type(pulp.getSolver(solver, msg=False)).__init__).parameters
        runner = pulp.getSolver(solver, **{name: value for name, value in options.items() if name in named})
    try:
        problem.solve(runner)
    except pulp.PulpSolverError as error:
        raise ValueError(f"solver {short_name(solver)} failed: {error}; choose another") from error
    values: list[float] | None = None
    if problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        values = checked(program, [variable.value() or 0.0 for variable in variables])
    cost = math.inf if values is None else program.cost_of(values)
    is_proved = cost - relaxed.bound <= max(gap, PRECISION) * abs(cost) and values is not None
    stopped = TIME_LIMIT if math.isinf(nodes) else EFFORT_LIMIT
    is_infeasible = problem.status == pulp.LpStatusInfeasible
    has_ended = is_infeasible or problem.sol_status == pulp.LpSolutionOptimal
    return LinearSolution(
        values=values,
        bound=relaxed.bound,
        status=OPTIMAL if is_proved else UNPROVED if has_ended else stopped,
        solver=solver_text(solver),
        infeasible=is_infeasible,
    )


def checked(program: LinearProgram, values: list[float]) -> list[float] | None:
    """``values`` with integers rounded; None if they are no solution of ``program``."""
    import numpy as np

    answer, uppers = np.array(values), np.array(program.uppers)
    integers = np.array(program.integers, dtype=bool)
    rounded = np.where(integers, answer.round(), answer)
    products = np.array(program.coefficients) * rounded[np.array(program.columns, dtype=np.int64)]
    rows = np.repeat(np.arange(program.num_constraints), np.diff(program.starts))
    sums, sizes = (np.bincount(rows, array, program.num_constraints) for array in (products, np.abs(products)))
    slack = TOLERANCE * (1.0 + sizes)
    is_within = [
        np.abs(rounded - answer) <= TOLERANCE,
        (rounded >= -TOLERANCE) & (rounded <= uppers + TOLERANCE),
        sums >= np.array(program.row_lowers) - slack,
        sums <= np.array(program.row_uppers) + slack,
    ]
    return [float(value) for value in rounded] if all(array.all() for array in is_within) else None


def to_pulp(
    program: LinearProgram, *, scale: float = 1.0, name: str = "program", names: Mapping[int, str] | None = None
) -> tuple[Any, list[Any]]:
    """The program as a ``pulp.LpProblem`` with its variables in column order; ``names`` of columns, for people."""
    import pulp

    problem = pulp.LpProblem(name, pulp.LpMinimize)
    variables = [
        pulp.LpVariable(
            _variable_name(column, names or {}),
            0,
            None if math.isinf(upper) else upper,
            pulp.LpInteger if integer else pulp.LpContinuous,
        )
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


def _variable_name(column: int, names: Mapping[int, str]) -> str:
    """A name that LP files allow, unique because it begins with the column's number."""
    label = re.sub(r"[^A-Za-z0-9.]+", "_", names.get(column, "")).strip("_")
    return f"v{column}_{label}"[:LONGEST_NAME].rstrip("_")


def write_program(
    program: LinearProgram, path: str | Path, *, what: str, scale: float, names: Mapping[int, str] | None = None
) -> None:
    """Write ``program`` as an LP file whose objective is its own times ``scale``; ``what`` it is, for its first line.

    Raises:
        ValueError: if the file cannot be written.
    """
    problem, _ = to_pulp(program, scale=scale, name=what, names=names)
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder, "program.lp")
        problem.writeLP(str(draft), max_length=LONGEST_NAME)
        write_text(path, draft.read_text())
