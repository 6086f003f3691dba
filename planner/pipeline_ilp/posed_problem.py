"""A stage problem with what is known of it whatever has to be beaten: a search with a smaller gap asks for it again."""

from __future__ import annotations

import math

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
        settled = folded(problem)
        self._bounds, self._load = time_bounds(settled), LoadWithinMemory(settled)

    def quick_bound(self, cutoff: float) -> float:
        """A weaker bound than ``bound_within_memory``, computed ten times as fast."""
        bounds = self._bounds
        return bounds.step_with(self._load.bound(lower=bounds.load, upper=bounds.load_within(cutoff)))


def quick_bound(problem: StageProblem, *, cutoff: float = math.inf) -> float:
    """The same of a problem that is asked for once."""
    return PosedProblem(problem).quick_bound(cutoff)
