"""Which of a search's solutions becomes the plan: the simulator judges those that are near the best."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cost_models.step_time import least_simulated
from planner.pipeline_ilp.stage_problem import ROUNDING, as_step
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.demands import Demands
from planner.whole_step.offloading import fits_on_host
from planner.whole_step.result.outcome import Outcome, StepSolution
from planner.whole_step.result.plan_of_solution import Judged, judge
from planner.whole_step.result.uniform_plans import versions

#: How many solutions are simulated at most beside the requested ones, and how much slower than the best they may be by
#: the closed form, or than what that takes in the simulator; those that are not chosen are the plan's runners-up.
JUDGED, NEAR = 8, 0.05
#: Runners-up that a plan has at least, however much slower, if so many were solved.
CLOSEST = 3
#: A solution counts as proved if the closed form puts it within this share of the bound.
PROVED = 0.01
#: Share of ``PROVED`` that a search for a proof aims at, to be safe from rounding.
ROUNDED = 0.99
#: A solution that is not proved is taken only if it is faster in the simulator by more than this share.
CLEARLY = 0.01


def judged_best(
    demands: Demands, search: Search, outcome: Outcome, experts: Sequence[Judged]
) -> tuple[Judged, list[Judged]]:
    """Simulate the solutions: the fastest, or an expert's if that is faster, and the others."""
    num_plans, fastest = demands.num_alternatives, outcome.solutions[0].seconds
    judged = [judge(solution) for solution in outcome.solutions[:num_plans]]
    for solution in outcome.solutions[num_plans:JUDGED]:
        quickest = min(each.report.seconds for each in judged)
        if solution.seconds <= max(quickest, fastest * (1.0 + NEAR)):
            judged.append(judge(solution))
    plain = list(judged)
    for solved in judged:
        for each in versions(solved.solution, demands):
            if fits_on_host(search, each) and _may_be_best(each, outcome.bound, plain):
                plain.append(judge(each))
    fitting = [each for each in experts if fits_on_host(search, each.solution)]
    best = min([_best(plain, outcome.bound), *fitting], key=lambda each: each.report.seconds)
    others = [each for each in judged if each is not best]
    further = outcome.solutions[len(judged) : len(judged) + max(0, CLOSEST - len(others))]
    return best, [*others, *map(judge, further)]


def _may_be_best(solution: StepSolution, bound: float, judged: Sequence[Judged]) -> bool:
    """Whether ``_best`` may pick a solution beside those that are judged: none as near as it is faster."""
    rivals = [each for each in judged if _is_near(each.solution, bound)] if _is_near(solution, bound) else judged
    quickest = min((each.report.seconds for each in rivals), default=math.inf)
    return least_simulated(as_step(solution.problem, solution.assignment)) <= quickest * (1.0 + ROUNDING)


def _is_near(solution: StepSolution, bound: float) -> bool:
    """Whether a solution is proved near-optimal by the closed form."""
    return solution.seconds * (1.0 - PROVED) <= bound


def _best(judged: list[Judged], bound: float) -> Judged:
    """The solution that is fastest in the simulator among those proved near-optimal by the closed form, unless another
    is clearly faster."""
    fastest = min(judged, key=lambda candidate: candidate.report.seconds)
    near = [candidate for candidate in judged if _is_near(candidate.solution, bound)]
    best = min(near, key=lambda candidate: candidate.report.seconds, default=fastest)
    return fastest if fastest.report.seconds < best.report.seconds * (1.0 - CLEARLY) else best
