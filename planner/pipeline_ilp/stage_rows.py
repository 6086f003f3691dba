"""The rows of the stage program: each function adds the constraints named in parentheses, as ``stage_ilp`` states."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from cost_models.schedules import SCHEDULES
from planner.pipeline_ilp.stage_problem import StageProblem
from planner.pipeline_ilp.stage_program import REFERENCE, Linear, Move, StageProgram, chunks_of, in_rounds, spans
from planner.pipeline_ilp.tail_rows import add_tail


def build_stage_program(problem: StageProblem, *, load_bound: float) -> StageProgram:
    """Build the program; ``load_bound`` is a proved lower bound of the largest load of a rank, in seconds."""
    stage = StageProgram(problem, second=(load_bound or 1.0) / REFERENCE)
    add_units(stage)
    add_order(stage)
    first = problem.runs_on(problem.ranks[0])[0]
    names = ("reduce_step", "last_reductions") if problem.may_be_late else ("reduce_step",)
    if first.count > 1 and any(len({getattr(each.costs, name) for each in first.choices}) > 1 for name in names):
        add_first(stage)
    forward, backward = add_streams(stage)
    add_pipeline(stage, forward, backward, load_bound)
    add_tail(stage, backward)
    add_update(stage)
    add_memory(stage)
    return stage


def add_units(stage: StageProgram) -> None:
    """(place) and (hold): the columns n[k,c]; every unit is in one chunk, every chunk has a unit."""
    problem, program = stage.problem, stage.program
    allowed = spans(problem)
    for chunk in range(problem.num_chunks):
        moves = []
        for index, run in enumerate(problem.runs_on(problem.ranks[chunk])):
            if chunk not in allowed[index]:
                continue
            for choice, option in enumerate(run.choices):
                column = program.variable(upper=float(run.count), integer=True)
                moves.append(Move(index, choice, column, option))
        stage.moves.append(moves)
        stage.chunk_rows.append(program.row([(move.column, 1.0) for move in moves], lower=1.0))
    for index, run in enumerate(problem.runs):
        columns = [(move.column, 1.0) for moves in stage.moves for move in moves if move.run == index]
        program.row(columns, lower=float(run.count), upper=float(run.count))


def add_order(stage: StageProgram) -> None:
    """(order): a run may begin in a chunk only if the run before it is complete by the end of that chunk."""
    problem = stage.problem
    allowed = spans(problem)
    for run in range(len(problem.runs) - 1):
        count, following = problem.runs[run].count, problem.runs[run + 1].count
        for chunk in allowed[run + 1]:
            if chunk >= allowed[run].stop - 1:
                break
            complete = stage.program.variable(upper=1.0, integer=True)
            so_far, begun = Linear([(complete, -float(count))]), Linear([(complete, -float(following))])
            for before in range(chunk + 1):
                so_far.add(stage.units(before, run))
                begun.add(stage.units(before, run + 1))
            stage.row(so_far, lower=0.0)
            stage.row(begun, upper=0.0)


def add_first(stage: StageProgram) -> None:
    """(first): the very first unit takes one of the choices of the first run that the first chunk uses."""
    for move in stage.moves[0]:
        if move.run == 0:
            column = stage.program.variable(upper=1.0, integer=True)
            stage.first.append((move.choice, column))
            stage.program.row([(move.column, 1.0), (column, -1.0)], lower=0.0)
    stage.program.row([(column, 1.0) for _, column in stage.first], lower=1.0, upper=1.0)


def add_streams(stage: StageProgram) -> tuple[list[Linear], list[Linear]]:
    """(stream): f[k] and b[k], of a problem whose overlapped communication is folded into its compute."""
    problem = stage.problem
    forward = [stage.seconds([chunk], "forward") for chunk in range(problem.num_chunks)]
    backward = [stage.seconds([chunk], "backward") for chunk in range(problem.num_chunks)]
    add_receives(stage, forward, backward)
    return forward, backward


def add_receives(stage: StageProgram, forward: list[Linear], backward: list[Linear]) -> None:
    """(receive): a chunk pays to receive its input from another rank, the chunk before pays to receive the gradient."""
    problem = stage.problem
    ranks, allowed = problem.ranks, spans(problem)
    for chunk in range(1, problem.num_chunks):
        if ranks[chunk] == ranks[chunk - 1]:
            continue
        runs = [run for run in range(len(problem.runs)) if chunk in allowed[run]]
        here, before_it = problem.runs_on(ranks[chunk]), problem.runs_on(ranks[chunk - 1])
        costs = {run: (here[run].receive_forward, before_it[run].receive_backward) for run in runs}
        if len(set(costs.values())) == 1:
            received, returned = costs[runs[0]]
            forward[chunk].constant += received / stage.second
            backward[chunk - 1].constant += returned / stage.second
            continue
        begins = [(run, stage.program.variable(upper=1.0, integer=True)) for run in runs]
        stage.program.row([(column, 1.0) for _, column in begins], lower=1.0, upper=1.0)
        for run, column in begins:
            stage.row(stage.units(chunk, run).add(Linear([(column, -1.0)])), lower=0.0)
            for before in (other for other in runs if other < run):
                count = float(problem.runs[before].count)
                stage.row(stage.units(chunk, before).add(Linear([(column, count)])), upper=count)
            forward[chunk].terms.append((column, costs[run][0] / stage.second))
            backward[chunk - 1].terms.append((column, costs[run][1] / stage.second))


def add_pipeline(stage: StageProgram, forward: Sequence[Linear], backward: Sequence[Linear], load_bound: float) -> None:
    """(load), (round), (fill): m times the seconds of a micro-batch, plus filling and draining the pipeline."""
    problem, program = stage.problem, stage.program
    plain = not SCHEDULES[problem.schedule].splits_backward
    times = problem.num_microbatches - (plain and problem.num_ranks > 1 and not in_rounds(problem))
    stage.forward, stage.backward = forward, backward
    largest = stage.largest = program.variable(float(times))
    program.row([(largest, 1.0)], lower=load_bound / stage.second)
    for chunks in chunks_of(problem):
        load = Linear()
        for chunk in chunks:
            load.add(forward[chunk]).add(backward[chunk])
        if not in_rounds(problem):
            stage.at_least(largest, load)
        stage.loads.append(load)
    if problem.num_ranks == 1:
        return
    if in_rounds(problem):
        add_rounds(stage, forward, backward, largest)
    elif plain:
        if SCHEDULES[problem.schedule].by_direction:
            add_directions(stage, forward, backward, largest)
        for chunk in range(problem.num_chunks):
            stage.minimise(Linear().add(forward[chunk]).add(backward[chunk]))
    else:
        add_split_fill(stage, forward, backward, largest)


def add_directions(stage: StageProgram, forward: Sequence[Linear], backward: Sequence[Linear], largest: int) -> None:
    """(direction): all forwards go as fast as the slowest of them, and all backwards."""
    both = Linear()
    for seconds in (forward, backward):
        slowest = stage.program.variable()
        for each in seconds:
            stage.at_least(slowest, each)
        both.terms.append((slowest, 1.0))
    stage.at_least(largest, both)


def add_rounds(stage: StageProgram, forward: Sequence[Linear], backward: Sequence[Linear], largest: int) -> None:
    """(round), (fill): a round takes as long as its longest chunk; filling is the longest round less that chunk."""
    rounds, fill = Linear(), stage.program.variable(1.0)
    stage.fill = fill
    for together in zip(*chunks_of(stage.problem)):
        longest = stage.program.variable()
        through = Linear([(longest, -1.0)])
        for chunk in together:
            stage.at_least(longest, Linear().add(forward[chunk]).add(backward[chunk]))
            through.add(forward[chunk]).add(backward[chunk])
        rounds.terms.append((longest, 1.0))
        stage.at_least(fill, through)
    stage.at_least(largest, rounds)


def add_split_fill(stage: StageProgram, forward: Sequence[Linear], backward: Sequence[Linear], largest: int) -> None:
    """(fill) of a split backward: the published bubble, or what paths through the order add to m·L."""
    problem, program = stage.problem, stage.program
    ranks, m = problem.num_ranks, problem.num_microbatches
    schedule = SCHEDULES[problem.schedule]
    weight = stage.weight = [stage.seconds([chunk], "backward_weight") for chunk in range(problem.num_chunks)]
    share, cost = (ranks - 1) / ranks, 0.0 if schedule.played else 1.0
    filled = Linear()
    for chunk in range(problem.num_chunks):
        fill = program.variable(cost * share)
        filled.terms.append((fill, share))
        for on_forward, on_inputs, on_weight in schedule.fills_on(ranks):
            expression = Linear().add(forward[chunk], on_forward).add(backward[chunk], on_inputs)
            stage.at_least(fill, expression.add(weight[chunk], on_weight - on_inputs))
    if schedule.played:
        stage.pipeline = Linear([(largest, float(m)), (program.variable(1.0), 1.0)])
        filled.terms.append((largest, float(m)))
        stage.row(Linear().add(stage.pipeline).add(filled, -1.0), lower=0.0)


def add_update(stage: StageProgram) -> None:
    """(update): the slowest rank's optimizer update and gathering of the updated parameters."""
    problem = stage.problem
    every_run = (run for runs in (problem.rank_runs or (problem.runs,)) for run in runs)
    if not any(c.costs.update_step or c.costs.gather_step for run in every_run for c in run.choices):
        return
    update = stage.program.variable(1.0)
    for chunks in chunks_of(problem):
        stage.at_least(update, stage.seconds(chunks, "update_step", "gather_step"))


def add_memory(stage: StageProgram) -> None:
    """(remember), (peak): state, activations in flight and the largest peak of each rank fit in its memory.

    One row for each moment at which the activations may be the most.
    """
    problem = stage.problem
    for chunks, limit, moments in zip(chunks_of(problem), problem.memory, problem.moments):
        if math.isinf(limit):
            continue
        peak = _peak(stage, chunks)
        unit = (limit if limit > 0 else 1.0) / REFERENCE
        for moment in moments:
            used, held = Linear(), dict(moment)
            for chunk in chunks:
                used.add(stage.total([chunk], lambda costs: costs.state_bytes))
                used.add(stage.total([chunk], lambda costs: costs.saved_bytes), float(held.get(chunk, 0)))
            used.add(peak)
            stage.row(Linear().add(used, 1 / unit), upper=limit / unit)


def _peak(stage: StageProgram, chunks: Sequence[int]) -> Linear:
    """(peak): the largest peak_bytes of a rank, as a sum of differences between consecutive levels."""
    moves = [move for chunk in chunks for move in stage.moves[chunk]]
    levels = sorted({move.option.costs.peak_bytes for move in moves})
    peak = Linear([], levels[0])
    for below, level in itertools.pairwise(levels):
        reached = stage.program.variable(upper=1.0, integer=True)
        peak.terms.append((reached, level - below))
        by_run: dict[int, list[tuple[int, float]]] = {}
        for move in moves:
            if move.option.costs.peak_bytes >= level:
                by_run.setdefault(move.run, []).append((move.column, 1.0))
        for run, terms in by_run.items():
            stage.program.row([*terms, (reached, -float(stage.problem.runs[run].count))], upper=0.0)
    return peak
