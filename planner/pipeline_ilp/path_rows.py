"""(path): paths through the order of actions as rows, for schedules whose order is played.

There are too many paths for one program. Only the longest paths of candidate assignments are added, and the program is
solved again until the longest path of its solution is among its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cost_models.order_path import Counts, longest_path, played_microbatches
from planner.pipeline_ilp.stage_program import Linear, StageProgram

#: A path becomes a row if it is longer than the program's pipeline by more than this share.
NEGLIGIBLE = 1e-4


def add_paths(stage: StageProgram, paths: Iterable[Counts]) -> int:
    """Add a row for every path that the program does not have yet; return how many were added.

    m·L + G ≥ Σ_k (F·f[k] + I·(b[k] − W[k]) + W·W[k]) + L for each micro-batch that is not played, with F, I and W the
    numbers of forwards and gradients of inputs and of weights of chunk k on the path.
    """
    problem = stage.problem
    new = [counts for counts in paths if counts not in stage.paths]
    rest = problem.num_microbatches - played_microbatches(problem.schedule, problem.num_ranks, problem.num_microbatches)
    for counts in new:
        assert stage.pipeline is not None  # only schedules that are played have paths
        stage.paths.add(counts)
        row = Linear().add(stage.pipeline)
        row.terms.append((stage.largest, -float(rest)))
        for chunk, (forwards, inputs, weights) in enumerate(counts):
            row.add(stage.forward[chunk], -float(forwards)).add(stage.backward[chunk], -float(inputs))
            row.add(stage.weight[chunk], float(inputs - weights))
        stage.row(row, lower=0.0)
    return len(new)


def add_longest_path(stage: StageProgram, values: Sequence[float]) -> bool:
    """Add the longest path for a solution's chunk times; whether it is new and longer than the pipeline."""
    problem = stage.problem
    if stage.pipeline is None:
        return False
    seconds = []
    for chunk_forward, chunk_backward, chunk_weight in zip(stage.forward, stage.backward, stage.weight):
        weight = chunk_weight.at(values)
        seconds.append((chunk_forward.at(values), chunk_backward.at(values) - weight, weight))
    played = played_microbatches(problem.schedule, problem.num_ranks, problem.num_microbatches)
    path = longest_path(problem.schedule, num_ranks=problem.num_ranks, num_microbatches=played, seconds=seconds)
    rest = (problem.num_microbatches - played) * values[stage.largest]
    if path.seconds + rest <= stage.pipeline.at(values) * (1 + NEGLIGIBLE):
        return False
    return add_paths(stage, [path.counts]) > 0
