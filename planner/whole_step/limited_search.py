"""What a search may spend: seconds of the clock, and integer programs, of which its decisions depend on the latter."""

from __future__ import annotations

import time
from dataclasses import replace

from cost_models import Cluster
from planner.solvers.linear import EFFORT_LIMIT, OPTIMAL, TIME_LIMIT
from planner.whole_step.candidate_problems import CandidateProblems
from planner.whole_step.candidates.demands import Demands
from planner.whole_step.costs.level_one import LevelOne


class LimitedSearch(CandidateProblems):
    """The problems of all candidates, and the limits of a search among them."""

    def __init__(self, level_one: LevelOne, cluster: Cluster, demands: Demands) -> None:
        super().__init__(level_one, cluster, demands)
        self.deadline, self.status = float("inf"), OPTIMAL
        self.time_limit = demands.seconds
        self.max_programs = demands.programs_of(level_one.num_experts)
        self.stage_programs, self.shardings_before = 0.0, level_one.num_programs

    @property
    def num_programs(self) -> float:
        """Integer programs that were solved; a stage program counts by its effort."""
        return self.level_one.num_programs - self.shardings_before + self.stage_programs

    def remaining(self, demands: Demands) -> Demands | None:
        """``demands`` with what this search leaves of its limits, None if nothing is left."""
        seconds, programs = self.deadline - time.monotonic(), self.max_programs - self.num_programs
        return replace(demands, time_limit=seconds, max_programs=programs) if seconds > 0 and programs >= 1 else None

    def _is_stopped(self) -> bool:
        """Whether a limit is reached, which the plan reports. The clock decides nothing else."""
        if self.status == OPTIMAL and self.num_programs >= self.max_programs:
            self.status = EFFORT_LIMIT
        if self.status == OPTIMAL and time.monotonic() > self.deadline:
            self.status = TIME_LIMIT
        return self.status != OPTIMAL
