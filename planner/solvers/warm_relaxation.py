"""A linear relaxation that HiGHS solves again and again, with other bounds of some rows and with further rows.

Each solve begins at the basis of the one before, and takes a few iterations where one from scratch takes hundreds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from planner.solvers.linear import EFFORT_LIMIT, OPTIMAL, TIME_LIMIT, LinearProgram, LinearSolution
from planner.solvers.solver import MOST, cost_scale, pass_model


class WarmRelaxation:
    """The relaxation of a program, held by one solver.

    Rows that are added to ``program`` meanwhile are handed to the solver at its next solve.
    """

    def __init__(self, program: LinearProgram) -> None:
        import highspy

        self.program, self.scale = program, cost_scale(program)
        self.num_rows = program.num_constraints
        self.highs = highspy.Highs()
        options: dict[str, Any] = {"output_flag": False, "random_seed": 0, "threads": 1, "parallel": "off"}
        options["presolve"] = "off"  # only the first solve is from scratch, and what begins at its basis is faster
        for name, value in options.items():
            self.highs.setOptionValue(name, value)
        pass_model(self.highs, program.relaxed(), self.scale)
        self.changed: set[int] = set()

    def solve(
        self, rows: Mapping[int, tuple[float, float]], *, effort: float = math.inf, time_limit: float = math.inf
    ) -> LinearSolution:
        """Solve with other bounds of some ``rows``; all others have the program's own.

        Args:
            effort: simplex iterations × entries, as of ``planner.solvers.solver.solve``; ``time_limit``: seconds.
        """
        import highspy

        highs, program = self.highs, self.program
        self._add_rows()
        for row in self.changed - set(rows):
            highs.changeRowBounds(row, program.row_lowers[row], program.row_uppers[row])
        for row, (lower, upper) in rows.items():
            highs.changeRowBounds(row, lower, upper)
        self.changed = set(rows)
        entries = max(1, program.num_entries)
        highs.setOptionValue("simplex_iteration_limit", int(min(MOST, 1 + effort / entries)))
        highs.setOptionValue("time_limit", highs.getRunTime() + time_limit)  # of all runs together
        highs.run()
        status, info = highs.getModelStatus(), highs.getInfo()
        optimal = status == highspy.HighsModelStatus.kOptimal
        stopped = TIME_LIMIT if status == highspy.HighsModelStatus.kTimeLimit else EFFORT_LIMIT
        return LinearSolution(
            values=list(highs.getSolution().col_value) if optimal else None,
            bound=info.objective_function_value / self.scale if optimal else 0.0,
            status=OPTIMAL if optimal else stopped,
            solver=f"HiGHS {highs.version()}",
            infeasible=status == highspy.HighsModelStatus.kInfeasible,
            effort=float(entries * max(0, info.simplex_iteration_count)),
        )

    def _add_rows(self) -> None:
        program = self.program
        for row in range(self.num_rows, program.num_constraints):
            entries = slice(program.starts[row], program.starts[row + 1])
            columns, coefficients = program.columns[entries], program.coefficients[entries]
            self._add_row(program.row_lowers[row], program.row_uppers[row], columns, coefficients)
        self.num_rows = program.num_constraints

    def _add_row(self, lower: float, upper: float, columns: Sequence[int], coefficients: Sequence[float]) -> None:
        import numpy as np

        indices, values = np.array(columns, dtype=np.int32), np.array(coefficients, dtype=np.float64)
        self.highs.addRow(lower, upper, len(indices), indices, values)
