"""A lower bound of the step from what the first units of a single chunk leave to reduce (``cost_models.step_time``).

Without memory limits the step of one chunk is a sum over units, and a tail that one row bounds: of the first unit, or
of the first runs, alone or behind the unit next to them. The cheapest choices by each row bound the step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.pipeline_ilp.stage_problem import StageProblem


def late_bound(problem: StageProblem) -> float:
    """Seconds that no assignment of a ``folded`` problem beats; 0 where nothing is late."""
    return max(_steps(problem), default=0.0) if problem.may_be_late and problem.may_have_tail else 0.0


def _steps(problem: StageProblem) -> Iterator[float]:
    """The least step by each row."""
    counts = np.array([run.count for run in problem.runs], dtype=float)
    starts = np.cumsum([0, *(len(run.choices) for run in problem.runs[:-1])])
    choices = [choice.costs for run in problem.runs for choice in run.choices]
    times = problem.num_microbatches
    seconds = np.array(
        [
            times * (costs.forward + costs.backward) + costs.last_wait + costs.update_step + costs.gather_step
            for costs in choices
        ]
    )
    names = ("last_excess", "gather_backward", "last_reductions")
    excess, gathers, reductions = np.array([[getattr(costs, name) for name in names] for costs in choices]).T
    cheapest, lead, left, before = (
        np.minimum.reduceat(seconds + more, starts) for more in (0.0, reductions, excess, excess - gathers)
    )
    total = float(cheapest @ counts)
    yield total + float(lead[0] - cheapest[0])
    for run in range(1, len(counts)):
        rest = float(cheapest[run:] @ counts[run:])
        yield float(left[:run] @ counts[:run]) + rest
        behind = float(left[: run - 1] @ counts[: run - 1] + before[run - 1] * counts[run - 1])
        yield behind + float(lead[run] - cheapest[run]) + rest
