"""More uniform versions of a solution, for the simulator to compare.

The closed form overlaps a layer's communication with its own compute; in the simulator a gather overlaps with the layer
before. If ZeRO stages are mixed the two differ a little, and one stage for all may run faster. If the rounds of an
interleaved schedule differ, a long round delays the others more than the closed form says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cost_models.step_time import step_memory, step_seconds
from planner.pipeline_ilp.stage_ilp import even_rounds
from planner.pipeline_ilp.stage_problem import Assignment, UnitRun, as_step, fits
from planner.whole_step.result.outcome import StepSolution


def plainer(solution: StepSolution) -> Iterator[StepSolution]:
    """``solution`` with one ZeRO stage for all units, with and without one recompute policy for all, and with rounds
    of an interleaved schedule alike; those that fit."""
    for plain in (*_uniform(solution), *even_rounds(solution.problem)):
        step = as_step(solution.problem, plain)
        if fits(solution.problem, step_memory(step)):
            stages = replace(solution.stages, assignment=plain, objective=step_seconds(step).total)
            yield replace(solution, stages=stages)


def _uniform(solution: StepSolution) -> Iterator[Assignment]:
    """The same cuts with one stage for all units, and one policy for all or each its own."""
    problem, assignment = solution.problem, solution.assignment
    labels = {choice.label for run in problem.runs for choice in run.choices}
    policies = [None, *sorted({policy for policy, _ in labels})]
    tried = {assignment}
    for stage in sorted({stage for _, stage in labels}):
        for policy in policies:
            plain = _with(problem.runs, assignment, policy, stage)
            if plain in tried:
                continue
            tried.add(plain)
            yield plain


def _with(runs: Sequence[UnitRun], assignment: Assignment, policy: str | None, stage: str) -> Assignment:
    """The assignment with every unit at ``stage`` and under ``policy`` (None: its own), as far as it has them."""
    chunks = []
    for groups in assignment:
        counts: dict[tuple[int, int], int] = {}
        for run, choice, count in groups:
            wanted_policy = policy or runs[run].choices[choice].label[0]
            key = (run, _closest(runs[run], wanted_policy, stage))
            counts[key] = counts.get(key, 0) + count
        chunks.append(tuple((run, choice, count) for (run, choice), count in counts.items()))
    return tuple(chunks)


def _closest(run: UnitRun, policy: str, stage: str) -> int:
    """The choice of a unit with this policy and stage; lacking these, the first with one of them."""
    labels = [choice.label for choice in run.choices]

    def misses(index: int) -> tuple[bool, bool]:
        return labels[index][1] != stage, labels[index][0] != policy

    return min(range(len(labels)), key=misses)
