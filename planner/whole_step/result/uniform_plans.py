"""Other versions of a solution that the closed form prices alike or nearly so, for the simulator to compare.

The closed form overlaps a layer's communication with its own compute; in the simulator a gather overlaps with the layer
before. If ZeRO stages are mixed the two differ a little, and one stage for all may run faster. If the rounds of an
interleaved schedule differ, a long round delays the others more than the closed form says. GPipe and 1F1B are priced
alike on equal stages: on uneven ones 1F1B runs faster, and GPipe where communication is longer than compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cost_models.schedules import reason_not
from cost_models.step_time import step_memory, step_seconds
from planner.pipeline_ilp.stage_ilp import even_rounds
from planner.pipeline_ilp.stage_problem import Assignment, StageProblem, UnitRun, as_step, fits
from planner.whole_step.candidates.candidates import Candidate
from planner.whole_step.candidates.demands import Demands
from planner.whole_step.result.outcome import StepSolution

#: Schedules of one closed form on equal stages: one chunk a rank, backward passes whole.
PRICED_ALIKE = ("1f1b", "gpipe")


def versions(solution: StepSolution, demands: Demands) -> Iterator[StepSolution]:
    """All that the simulator may prefer to ``solution``."""
    yield from plainer(solution)
    for other in in_other_orders(solution, demands):
        yield other
        yield from plainer(other)


def in_other_orders(solution: StepSolution, demands: Demands) -> Iterator[StepSolution]:
    """``solution`` under the schedules that are priced as its own, which the demands allow; those that fit."""
    candidate = solution.candidate
    if candidate.layout.pipeline == 1 or candidate.schedule not in PRICED_ALIKE:
        return
    for schedule in demands.among("schedule", PRICED_ALIKE):
        other = replace(candidate, schedule=schedule)
        if schedule == candidate.schedule or not _runs(other):
            continue
        problem = replace(solution.problem, schedule=schedule)
        if _fits(problem, solution.assignment):
            yield replace(_priced(solution, problem, solution.assignment), candidate=other)


def _runs(candidate: Candidate) -> bool:
    shape = {"num_ranks": candidate.layout.pipeline, "num_chunks": candidate.num_chunks}
    return reason_not(candidate.schedule, num_microbatches=candidate.num_microbatches, **shape) is None


def _fits(problem: StageProblem, assignment: Assignment) -> bool:
    return fits(problem, step_memory(as_step(problem, assignment)))


def plainer(solution: StepSolution) -> Iterator[StepSolution]:
    """``solution`` with one ZeRO stage for all units, with and without one recompute policy for all, and with rounds
    of an interleaved schedule alike; those that fit."""
    for plain in (*_uniform(solution), *even_rounds(solution.problem)):
        if _fits(solution.problem, plain):
            yield _priced(solution, solution.problem, plain)


def _priced(solution: StepSolution, problem: StageProblem, assignment: Assignment) -> StepSolution:
    seconds = step_seconds(as_step(problem, assignment)).total
    stages = replace(solution.stages, assignment=assignment, objective=seconds)
    return replace(solution, problem=problem, stages=stages)


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
