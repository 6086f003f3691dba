"""What no cut and no choice can beat."""

from __future__ import annotations

from planner.step.stage_problem import StageProblem


def lower_bound(problem: StageProblem) -> float:
    """Seconds that no assignment beats, whatever the memory."""
    return load_bound(problem) * max(problem.num_microbatches - 1, 1)


def load_bound(problem: StageProblem) -> float:
    """Seconds that the busiest rank computes at least for one micro-batch."""
    total = sum(
        run.count * min(choice.costs.forward + choice.costs.backward for choice in run.choices) for run in problem.runs
    )
    return total / problem.num_ranks
