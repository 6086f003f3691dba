"""The rows of the stage program that say which gradient reductions prolong the step, as ``stage_ilp`` states them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from cost_models.schedule_orders import microbatches_per_round
from cost_models.schedules import SCHEDULES
from planner.pipeline_ilp.stage_program import Linear, Move, StageProgram, chunks_of, in_rounds


def add_tail(stage: StageProgram, backward: Sequence[Linear]) -> None:
    """(tail), (late): gradient reductions that no later backward pass hides, and the very first layer's reduction."""
    problem, program = stage.problem, stage.program
    if not problem.may_have_tail:
        return
    tail = program.variable(1.0)
    if SCHEDULES[problem.schedule].ends_in_weights:
        add_tail_of_weights(stage, backward, tail)
        return
    whole = float(not SCHEDULES[problem.schedule].splits_backward)
    if in_rounds(problem):
        add_tail_by_rounds(stage, backward, tail)
    else:
        add_tail_of_all(stage, backward, tail, whole=whole)
    stage.at_least(tail, _of_first(stage, "reduce_step"))
    if problem.may_be_late:
        waits = stage.seconds(range(problem.num_chunks), "last_wait")
        for late in _late(stage):
            stage.at_least(tail, late.add(waits))


def add_tail_of_all(stage: StageProgram, backward: Sequence[Linear], tail: int, *, whole: float) -> None:
    """(tail) of what each rank's last backward passes, and the ranks before it, leave."""
    problem = stage.problem
    waits = Linear().add(stage.seconds(range(problem.num_chunks), "last_wait"), whole)
    if any(factor for _, factor in waits.terms):
        stage.at_least(tail, waits)
    before = Linear()
    for chunks in chunks_of(problem):
        last_backward = Linear().add(stage.seconds(chunks, "last_wait"), whole)
        for chunk in chunks:
            last_backward.add(backward[chunk])
        if _may_outlast(stage, chunks, whole=whole):
            communication = stage.seconds(chunks, "last_communication").add(waits)
            stage.at_least(tail, communication.add(last_backward, -1.0).add(before, -1.0))
        before.add(last_backward, problem.num_ranks / problem.num_chunks)


def add_tail_by_rounds(stage: StageProgram, backward: Sequence[Linear], tail: int) -> None:
    """(tail) where a rank's chunk runs for a round of micro-batches before the next, the model's first one last."""
    problem = stage.problem
    others = float(microbatches_per_round(problem.num_ranks, problem.num_microbatches) - 1)
    before = Linear()
    for chunks in chunks_of(problem):
        waits = stage.seconds(chunks, "last_wait")
        if any(factor for _, factor in waits.terms):
            stage.at_least(tail, waits)
        left = Linear().add(waits).add(before, -1.0)
        for chunk in chunks:
            wait = stage.seconds([chunk], "last_wait")
            left.add(stage.seconds([chunk], "last_communication")).add(backward[chunk], -1.0).add(wait, -1.0)
            if _may_outlast(stage, [chunk], whole=1.0):
                stage.at_least(tail, left)
            each_time = stage.seconds([chunk], "gather_backward", "reduce_backward")
            left.add(backward[chunk], -others).add(each_time, others)
        before.add(backward[chunks[0]]).add(stage.seconds(chunks[:1], "last_wait"))


def _may_outlast(stage: StageProgram, chunks: Sequence[int], *, whole: float) -> bool:
    """Whether any choice communicates longer than its last backward takes."""
    costs = [move.option.costs for chunk in chunks for move in stage.moves[chunk]]
    return any(figures.last_communication - whole * figures.last_wait > figures.backward for figures in costs)


def add_tail_of_weights(stage: StageProgram, backward: Sequence[Linear], tail: int) -> None:
    """(tail) where each chunk's last action makes gradients of weights: of each rank's last chunk, and of all."""
    ranks = chunks_of(stage.problem)
    slacks, of_all = ([_slack(stage, chunks, of_all=of_all) for chunks in ranks] for of_all in (False, True))
    stage.at_least(tail, _of_first(stage, "reduce_step"))
    for rank, chunks in enumerate(ranks):
        costs = [move.option.costs for chunk in chunks for move in stage.moves[chunk]]
        if not any(each.reductions > each.backward_weight for each in costs):
            continue
        exposed = _exposed(stage, chunks[:1])
        for slack in slacks[:rank]:
            exposed.add(slack, -1.0)
        stage.at_least(tail, exposed)
        if len(chunks) > 1:
            exposed = _exposed(stage, chunks)
            for other in set(range(1, len(ranks) - 1)) - {rank}:
                exposed.add(of_all[other], -1.0)
            if chunks[-1] == stage.problem.num_chunks - 1:
                for chunk in (chunk for others in ranks[1:] for chunk in others):
                    exposed.add(backward[chunk], -1.0 / len(chunks))
            stage.at_least(tail, exposed)


def _exposed(stage: StageProgram, chunks: Sequence[int]) -> Linear:
    return stage.total(chunks, lambda costs: (costs.reductions - costs.backward_weight) / stage.second)


def _slack(stage: StageProgram, chunks: Sequence[int], *, of_all: bool) -> Linear:
    """The slack of a rank's chunks in the mean."""
    schedule, unit = SCHEDULES[stage.problem.schedule], len(chunks) * stage.second
    return stage.total(
        chunks, lambda costs: schedule.slack_seconds(costs.backward, costs.backward_weight, of_all=of_all) / unit
    )


def _of_first(stage: StageProgram, name: str) -> Linear:
    """Seconds of the very first unit."""
    first_run = stage.problem.runs_on(stage.problem.ranks[0])[0]
    seconds = [getattr(choice.costs, name) / stage.second for choice in first_run.choices]
    if len(set(seconds)) == 1:
        return Linear([], seconds[0])
    first = stage.first or [(move.choice, move.column) for move in stage.moves[0] if move.run == 0]
    return Linear([(column, seconds[choice]) for choice, column in first])


def _late(stage: StageProgram) -> Iterator[Linear]:
    """(late): what the first unit, and the first runs, alone and behind the unit next to them, leave to reduce."""
    yield _of_first(stage, "last_reductions")
    (moves,) = stage.moves
    excess = Linear()
    for run, following in itertools.pairwise(range(len(stage.problem.runs))):
        of_run = [move for move in moves if move.run == run]
        excess = Linear().add(excess).add(_sum_of(stage, of_run, "last_excess"))
        if any(factor > 0 for _, factor in excess.terms):
            yield Linear().add(excess)
        least = _least_of(stage, [move for move in moves if move.run == following])
        yield least.add(excess).add(_sum_of(stage, of_run, "gather_backward"), -1.0)


def _sum_of(stage: StageProgram, moves: Sequence[Move], name: str) -> Linear:
    return Linear([(move.column, getattr(move.option.costs, name) / stage.second) for move in moves])


def _least_of(stage: StageProgram, moves: Sequence[Move]) -> Linear:
    """The least ``last_reductions`` of the choices that a run's units take."""
    seconds = [move.option.costs.last_reductions / stage.second for move in moves]
    if len(set(seconds)) == 1:
        return Linear([], seconds[0])
    beside = [stage.program.variable(upper=1.0) for _ in moves]
    for move, column in zip(moves, beside, strict=True):
        stage.program.row([(move.column, 1.0), (column, -1.0)], lower=0.0)
    stage.program.row([(column, 1.0) for column in beside], lower=1.0, upper=1.0)
    return Linear(list(zip(beside, seconds, strict=True)))
