"""What the simulator has as clearly faster than the plan of a search by the closed form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cost_models import Cluster
from passes.plan import Plan
from planner.pipeline_ilp.stage_problem import ROUNDING
from planner.solvers.linear import OPTIMAL
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.demands import Demands
from planner.whole_step.judged_search import (
    UNEVEN,
    JudgedSearch,
    judged_search,
    left_out_schedules,
    other_schedules,
    within_limits,
)
from planner.whole_step.judging import CLEARLY, PROVED, judged_best
from planner.whole_step.result.outcome import StepSolution
from planner.whole_step.result.plan_of_solution import continued, extract, judge, proved_as


@dataclass
class BeyondClosedForm:
    """Searches, after one by the closed form, for plans that are faster in the simulator."""

    cluster: Cluster
    search: Search
    pins: Mapping[str, Mapping[str, Any]]
    #: By id of its step, every extracted plan and its solution, to which these are added.
    solutions: dict[int, tuple[Plan, StepSolution]]
    #: The search of the plan's layout under other schedules.
    same_layout: JudgedSearch | None = None

    def best(self, plan: Plan) -> Plan:
        """The plan, or one that is clearly faster: among those that a promise of the closed form pruned, under another
        schedule of its layout, or under a schedule that the search leaves out.

        The plan's own layout comes first, since what it takes there is to be beaten everywhere.
        """
        plan = self._under_other_schedules(self._among_pruned(plan))
        chosen = self._under_left_out_schedules(plan)
        return chosen if chosen.step is plan.step else self._under_other_schedules(chosen)

    def _among_pruned(self, plan: Plan) -> Plan:
        """Of a plan that is not proved: it, or one that a promise of the closed form pruned."""
        is_open = plan.certificate.gap > max(self.search.demands.gap, PROVED) * (1.0 + ROUNDING)
        if not is_open or not plan.certificate.status.startswith(OPTIMAL):
            return plan
        if (demands := within_limits(self.search)) is None:
            return plan
        faster, _ = self._faster(plan, demands)
        bound = max(plan.certificate.bound, faster.certificate.bound)
        return continued(faster, plan.certificate, bound=bound)

    def _under_other_schedules(self, plan: Plan) -> Plan:
        """The plan, or one of its layout and micro-batches under another schedule whose order is played."""
        solution, seconds = self.solutions[id(plan.step)][1], plan.step.costs.simulated * (1.0 - CLEARLY)
        demands = other_schedules(self.search, solution, seconds=seconds)
        if demands is None:
            return plan
        faster, self.same_layout = self._faster(plan, demands, uneven=UNEVEN)
        return proved_as(faster, plan.certificate)

    def _under_left_out_schedules(self, plan: Plan) -> Plan:
        """The plan, or one under a schedule that the search leaves out."""
        demands = left_out_schedules(self.search)
        if demands is None:
            return plan
        faster, _ = self._faster(plan, demands, searched=self.same_layout)
        bound = min(plan.certificate.bound, faster.certificate.bound)
        return continued(faster, plan.certificate, bound=bound)

    def _faster(
        self, plan: Plan, demands: Demands, *, uneven: float = 0.0, searched: JudgedSearch | None = None
    ) -> tuple[Plan, JudgedSearch]:
        """The plan, or a clearly faster one that the demands allow, and the search for it.

        Args:
            uneven: the share by which its closed form may be slower.
            searched: a search whose candidates are not tried again, for what takes longer.
        """
        seconds = plan.step.costs.simulated * (1.0 - CLEARLY)
        other, outcome = judged_search(
            self.search, demands, limit=seconds, proved=plan.certificate.bound, uneven=uneven, searched=searched
        )
        if not outcome.solutions:
            return plan, other
        best, others = judged_best(demands, other, outcome, ())
        if best.report.seconds >= seconds:
            return plan, other
        rivals = [judge(self.solutions[id(plan.step)][1]), *others]
        faster = extract(other, outcome, best, rivals, cluster=self.cluster, constraints=self.pins)
        alternatives = {each.what: each for each in (*faster.step.alternatives, *plan.step.alternatives)}
        step = dataclasses.replace(faster.step, alternatives=tuple(alternatives.values()))
        faster = dataclasses.replace(faster, step=step)
        self.solutions[id(faster.step)] = faster, best.solution
        return faster, other
