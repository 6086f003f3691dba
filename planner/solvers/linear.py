"""A mixed-integer linear program as arrays, and its solution; which solver runs it is ``solver``'s business."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

#: ``Solution.status`` of a solution that is proved to be the best; of one that a limit stopped.
OPTIMAL, EFFORT_LIMIT, TIME_LIMIT = "optimal", "stopped by effort limit", "stopped by time limit"
STOPPED = (EFFORT_LIMIT, TIME_LIMIT)
#: ``Solution.status`` where the solver ended by itself, but not at the bound.
UNPROVED = "not proved to be the best"
#: Effort of a solver: simplex iterations × entries of the program, which needs no clock. About this much takes a
#: second.
SECOND = 1.6e8


class SettledRows(NamedTuple):
    """Bounds of a program's variables and rows as a solver takes them, and the lists that they were made of."""

    lists: tuple[list[float], list[float], list[float]]
    uppers: np.ndarray
    row_lowers: np.ndarray
    row_uppers: np.ndarray

    @staticmethod
    def of(program: LinearProgram) -> SettledRows:
        import numpy as np

        lists = program.uppers, program.row_lowers, program.row_uppers
        uppers, row_lowers, row_uppers = (np.asarray(each, dtype=np.float64) for each in lists)
        return SettledRows(lists, uppers, row_lowers, row_uppers)


@dataclass
class LinearProgram:
    """Minimise cost·v subject to row bounds, 0 ≤ v ≤ upper, some v integer.

    Rows are held as flat arrays (start of each row, columns, coefficients), ready to pass to a solver.
    """

    costs: list[float] = field(default_factory=list)
    uppers: list[float] = field(default_factory=list)
    integers: list[bool] = field(default_factory=list)
    row_lowers: list[float] = field(default_factory=list)
    row_uppers: list[float] = field(default_factory=list)
    starts: array[int] = field(default_factory=lambda: array("i", [0]))
    columns: array[int] = field(default_factory=lambda: array("i"))
    coefficients: array[float] = field(default_factory=lambda: array("d"))
    #: What ``settle`` has worked out.
    settled: SettledRows | None = field(default=None, compare=False, repr=False)

    @property
    def num_variables(self) -> int:
        return len(self.costs)

    @property
    def num_constraints(self) -> int:
        return len(self.row_lowers)

    @property
    def num_entries(self) -> int:
        return len(self.columns)

    def settle(self) -> None:
        """Work out bounds once for all programs that are made of this one by other costs; nothing is added to it
        afterwards."""
        self.settled = SettledRows.of(self)

    def bounds(self) -> SettledRows:
        """Bounds of variables and rows, settled or made now."""
        settled, lists = self.settled, (self.uppers, self.row_lowers, self.row_uppers)
        if settled is None or any(one is not other for one, other in zip(settled.lists, lists)):
            return SettledRows.of(self)
        return settled

    def cost_of(self, values: Sequence[float]) -> float:
        """The objective of a solution."""
        return sum(cost * value for cost, value in zip(self.costs, values))

    def relaxed(self) -> LinearProgram:
        """The program with no variable integer."""
        return replace(self, integers=[False] * self.num_variables)

    def variable(self, cost: float = 0.0, *, upper: float = math.inf, integer: bool = False) -> int:
        """Add a variable ≥ 0 and return its column."""
        self.costs.append(cost)
        self.uppers.append(upper)
        self.integers.append(integer)
        return len(self.costs) - 1

    def variables(self, count: int) -> range:
        """Add so many unbounded variables ≥ 0 without cost and return their columns."""
        first = len(self.costs)
        self.costs.extend([0.0] * count)
        self.uppers.extend([math.inf] * count)
        self.integers.extend([False] * count)
        return range(first, first + count)

    def row(self, terms: Iterable[tuple[int, float]], *, lower: float = -math.inf, upper: float = math.inf) -> int:
        """Add lower ≤ Σ coefficient·variable ≤ upper and return its row."""
        columns, coefficients = self.columns, self.coefficients
        for column, coefficient in terms:
            columns.append(column)
            coefficients.append(coefficient)
        return self._end_row(lower, upper)

    def row_of(self, columns: Iterable[int], coefficients: Iterable[float], *, lower: float, upper: float) -> int:
        """The same by variables and their coefficients, as many rows are added faster."""
        self.columns.extend(columns)
        self.coefficients.extend(coefficients)
        return self._end_row(lower, upper)

    def _end_row(self, lower: float, upper: float) -> int:
        self.starts.append(len(self.columns))
        self.row_lowers.append(lower)
        self.row_uppers.append(upper)
        return len(self.row_lowers) - 1


@dataclass(frozen=True)
class LinearSolution:
    """What a solver found.

    ``values`` is None without a feasible point; ``bound`` is a proved lower bound of the objective (of the program
    as given); ``infeasible`` says that there is no feasible point at all; ``effort`` is what it took (HiGHS only).
    """

    values: list[float] | None
    bound: float
    status: str
    solver: str
    infeasible: bool = False
    effort: float = 0.0
