"""What stops a solver early: seconds that somebody gives it, or else an effort, which is the same on every machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.solvers.linear import SECOND, LinearProgram

#: The effort where no seconds are given: about so many seconds of a machine that is not busy.
DEFAULT_EFFORT = 90 * SECOND
#: Simplex iterations that a program may take in any case: those of large ones touch few of their entries, a tenth of a
#: millisecond each.
DEFAULT_ITERATIONS = 400_000
#: Seconds after which the clock stops even that: presolve and heuristics are not counted as effort.
GUARD = 600.0


@dataclass(frozen=True)
class Limits:
    """Seconds and effort (``planner.solvers.solver.solve``) that a program may take; no less than ``iterations``."""

    seconds: float
    effort: float
    iterations: int = 0

    @classmethod
    def of(cls, time_limit: float | None) -> Limits:
        """So many seconds, whatever the effort; None: an effort, on every machine the same."""
        return cls(GUARD, DEFAULT_EFFORT, DEFAULT_ITERATIONS) if time_limit is None else cls(time_limit, math.inf)

    def effort_on(self, program: LinearProgram) -> float:
        """The effort that solving ``program`` may take."""
        return max(self.effort, float(self.iterations) * program.num_entries)

    def times(self, factor: int) -> Limits:
        """So many times as much."""
        return Limits(factor * self.seconds, factor * self.effort, factor * self.iterations)

    def __str__(self) -> str:
        """For people: ``60 s``, or the effort as seconds that it takes about."""
        return f"{self.seconds:g} s" if math.isinf(self.effort) else f"the effort of about {self.effort / SECOND:g} s"
