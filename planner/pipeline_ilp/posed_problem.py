"""A stage problem with what is known of it whatever has to be beaten: a search with a smaller gap asks for it again."""

from __future__ import annotations

import functools
import math

from planner.pipeline_ilp.average_bounds import ChainFigures, TimeBounds, average_bounds, chain_figures
from planner.pipeline_ilp.loads import LoadWithinMemory
from planner.pipeline_ilp.stage_bounds import time_bounds
from planner.pipeline_ilp.stage_problem import StageProblem, folded
from planner.pipeline_ilp.stage_proofs import Proofs


class PosedProblem:
    """A problem, its bounds and its proofs.

    Attributes:
        proofs: those of ``bound_within_memory`` and ``solve_stages``.
    """

    def __init__(self, problem: StageProblem) -> None:
        self.problem = problem
        self.proofs = Proofs()

    @functools.cached_property
    def _units(self) -> ChainFigures:
        return chain_figures(folded(self.problem))

    @functools.cached_property
    def _average(self) -> TimeBounds:
        return average_bounds(folded(self.problem), self._units)

    @functools.cached_property
    def _bounds(self) -> TimeBounds:
        return time_bounds(folded(self.problem), self._average, self._units)

    @functools.cached_property
    def _load(self) -> LoadWithinMemory:
        return LoadWithinMemory(folded(self.problem))

    def quick_bound(self, cutoff: float) -> float:
        """A weaker bound than ``bound_within_memory``, computed ten times as fast, and only up to ``cutoff``."""
        if self._average.step >= cutoff:
            return self._average.step
        bounds = self._bounds
        if bounds.step >= cutoff:
            return bounds.step
        return bounds.step_with(self._load.bound(lower=bounds.load, upper=bounds.load_within(cutoff)))


def quick_bound(problem: StageProblem, *, cutoff: float = math.inf) -> float:
    """The same of a problem that is asked for once."""
    return PosedProblem(problem).quick_bound(cutoff)
