"""Searches for plans below a limit: they find one that is faster, or prove that there is none, down to it."""

from __future__ import annotations

import math

from cost_models import Cluster
from planner.whole_step.candidates.demands import Demands
from planner.whole_step.candidates.expert_layouts import CappedSearch
from planner.whole_step.costs.level_one import LevelOne
from planner.whole_step.costs.stage_devices import WeightedLevelOne
from planner.whole_step.result.outcome import StepSolution
from planner.whole_step.unequal_search import UnequalSearch


class WinnerSearch(CappedSearch):
    """A search for plans below its limit: no other stops it, and where there is none it proves that, down to it."""

    def _add(self, solution: StepSolution) -> None:
        if solution.seconds < self.limit:
            super()._add(solution)

    def _stage_cutoff(self, gap: float) -> tuple[float, float]:
        return super()._stage_cutoff(gap) if self.solutions or math.isinf(self.limit) else (self.limit, 0.0)


class UnequalWinnerSearch(WinnerSearch, UnequalSearch):
    """The same on unequal devices, down to the limit over all shardings."""

    def to_beat(self, proved: float) -> float:
        """The limit, until something is faster."""
        return super().to_beat(proved) if self.solutions or math.isinf(self.limit) else self.limit


def winner_search(level_one: LevelOne, cluster: Cluster, demands: Demands, *, limit: float) -> WinnerSearch:
    """The search below ``limit`` seconds on a cluster, whatever its devices."""
    kind = UnequalWinnerSearch if isinstance(level_one, WeightedLevelOne) else WinnerSearch
    return kind(level_one, cluster, demands, limit=limit)
