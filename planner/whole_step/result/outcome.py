"""The result of a search of whole steps: solutions, the proved bound, and counts of candidates by fate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.pipeline_ilp.stage_problem import Assignment, StageProblem
from planner.pipeline_ilp.stage_search import StageSolution
from planner.whole_step.candidates.candidates import Candidate
from planner.whole_step.costs.level_one import Sharded


@dataclass(frozen=True)
class StepSolution:
    """One way to run the step: a candidate, its sharding, and the solution of its stage program."""

    candidate: Candidate
    sharded: Sharded
    problem: StageProblem
    stages: StageSolution

    @property
    def seconds(self) -> float:
        return self.stages.objective

    @property
    def assignment(self) -> Assignment:
        assert self.stages.assignment is not None  # nothing else becomes a solution
        return self.stages.assignment


def with_solution(solutions: Sequence[StepSolution], solution: StepSolution) -> list[StepSolution]:
    """``solutions`` and ``solution``, fastest first; of several with one candidate only the fastest."""
    previous = next((other for other in solutions if other.candidate == solution.candidate), None)
    if previous is not None and previous.seconds <= solution.seconds:
        return list(solutions)  # solved before, or under a sharding that is slower
    others = [other for other in solutions if other is not previous]
    return sorted([*others, solution], key=lambda entry: entry.seconds)


@dataclass
class Outcome:
    """The result of a search: solutions, best first, the proved bound, and counts of candidates by fate.

    ``bound`` is of the shardings that were searched. On unequal devices there are others that may be better on some of
    them: ``of_all_shardings`` bounds these, too (infinite where there is nothing to add).
    ``host_bytes``: where devices can hold some solution but no host can, the least that its fullest host would hold.
    """

    solutions: list[StepSolution]
    bound: float
    status: str
    counts: Counter[str] = field(default_factory=Counter)
    shortfalls: dict[Candidate, float] = field(default_factory=dict)
    host_bytes: float = 0.0
    of_all_shardings: float = float("inf")

    @property
    def proved(self) -> float:
        """The bound that a certificate states."""
        return min(self.bound, self.of_all_shardings)

    @property
    def gap(self) -> float:
        if not self.solutions:
            return float("inf")
        best = self.solutions[0].seconds
        return max(0.0, (best - self.bound) / best) if best else 0.0
