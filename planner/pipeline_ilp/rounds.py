"""(longest): a lower bound of filling and draining the pipeline, from the longest chunk of interleaved rounds.

Every rank's chunks together are load(r), and no chunk of round j is longer than L[j], so that of round j

    Σ_{k of round j} (f[k] + b[k]) ≥ Σ_r load(r) − p·(L − L[j])          since  Σ_j L[j] ≤ L

and filling takes that less L[j], of every round. Some chunk is at least h seconds long, so some L[j] is:

    G ≥ Σ_r load(r) − p·L + (p − 1)·h

The relaxation violates this: with fractional choices it makes all rounds equally long.
"""

from __future__ import annotations

import math

from planner.pipeline_ilp.ranks import main_run
from planner.pipeline_ilp.stage_problem import ROUNDING, StageProblem, UnitChoice
from planner.pipeline_ilp.stage_program import Linear, StageProgram, chunks_of, in_rounds

#: Lengths of the longest chunk are tried up to so many times the mean number of units of a chunk.
_TRIED = 3


def add_longest(stage: StageProgram) -> None:
    """(longest), for models that are one long run."""
    problem = stage.problem
    run = main_run(problem)
    if run is None or not in_rounds(problem):
        return
    ranks = problem.num_ranks
    row = Linear([(stage.fill, 1.0), (stage.largest, float(ranks))])
    for load in stage.loads:
        row.add(load, -1.0)
    stage.row(row, lower=(ranks - 1) * longest_chunk(problem, run) / stage.second)


def longest_chunk(problem: StageProblem, run: int) -> float:
    """Lower bound of the longest chunk in seconds, over all assignments within memory, of a ``folded`` problem.

    If no chunk were longer than a tried length, each rank could hold only the units that fit into that length a chunk,
    and into its memory, with choices that take no longer. The first length at which all units fit is the bound.
    """
    choices = sorted(problem.runs[run].choices, key=_seconds)
    quickest = _seconds(choices[0])
    if quickest <= 0:
        return 0.0
    most = _TRIED * math.ceil(problem.runs[run].count / problem.num_chunks)
    whole_units = {units * quickest for units in range(1, most + 1)}
    # between two consecutive lengths no further unit fits; beyond the last one it might
    lengths = whole_units | {_seconds(choice) for choice in choices if _seconds(choice) < most * quickest}
    for seconds in sorted(lengths):
        allowed = [choice for choice in choices if _seconds(choice) <= seconds * (1 + ROUNDING)]
        whole = math.floor(seconds / quickest * (1 + ROUNDING))
        if allowed and _most_units(problem, allowed, whole) >= problem.runs[run].count:
            return seconds
    return max(lengths)


def _most_units(problem: StageProblem, allowed: list[UnitChoice], per_chunk: int) -> int:
    """Upper bound of the units on all ranks in ``allowed`` choices, with at most ``per_chunk`` in a chunk."""
    total = 0
    peak = min(choice.costs.peak_bytes for choice in allowed)
    for limit, chunks in zip(problem.memory, chunks_of(problem)):
        room = limit * (1 + ROUNDING) - peak
        for held in sorted(problem.in_flight[chunk] for chunk in chunks):
            size = max(1.0, min(choice.costs.state_bytes + held * choice.costs.saved_bytes for choice in allowed))
            units = per_chunk if math.isinf(room) else min(per_chunk, math.floor(max(0.0, room) / size))
            total, room = total + units, room - units * size
    return total


def _seconds(choice: UnitChoice) -> float:
    return choice.costs.forward + choice.costs.backward
