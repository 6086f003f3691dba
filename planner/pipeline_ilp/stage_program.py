"""The stage program as arrays: each function adds the constraints named in parentheses, which ``ilp`` states."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cost_models.order_path import Counts
from cost_models.schedules import SCHEDULES
from cost_models.step import LayerCosts
from planner.pipeline_ilp.stage_problem import StageProblem, UnitChoice
from planner.solvers.linear import LinearProgram
from planner.solvers.warm_relaxation import WarmRelaxation

#: Scaled mean load of a rank and scaled memory limit of a rank: both stay well above the solver's tolerances.
REFERENCE = 1000.0


@dataclass
class Linear:
    """Σ coefficient·column + constant."""

    terms: list[tuple[int, float]] = field(default_factory=list)
    constant: float = 0.0

    def add(self, other: Linear, factor: float = 1.0) -> Linear:
        """Add ``factor`` times another expression, in place."""
        self.terms.extend((column, factor * value) for column, value in other.terms)
        self.constant += factor * other.constant
        return self

    def at(self, values: Sequence[float]) -> float:
        """The expression's value."""
        return self.constant + sum(factor * values[column] for column, factor in self.terms)


@dataclass(frozen=True)
class Move:
    """The column n[k,c]: units in one chunk of one run and choice."""

    run: int
    choice: int
    column: int
    option: UnitChoice


@dataclass
class StageProgram:
    """The program and the columns of its variables.

    Times are in units of ``second`` seconds; ``constant`` is the part of the objective outside of the program.
    ``moves[k]`` are the columns of chunk k. ``first`` holds (choice, column) for w[c], where the very first unit's
    choice is a separate variable. ``loads[r]`` is the load of rank r; ``forward`` and ``backward`` are f[k] and b[k],
    ``weight`` is W[k] where a schedule splits the backward; ``largest`` is the column of L and, with rounds, ``fill``
    the column of G. With two chunks a rank, ``pipeline`` is m·L + G, and ``paths`` are the paths through the order that
    have a row (``planner.pipeline_ilp.path_rows``). ``chunk_rows`` are the rows of how many units each chunk holds,
    ``share_rows`` of how many of the long run each rank does (``planner.pipeline_ilp.ranks.add_tables``).
    """

    problem: StageProblem
    second: float
    program: LinearProgram = field(default_factory=LinearProgram)
    constant: float = 0.0
    moves: list[list[Move]] = field(default_factory=list)
    first: list[tuple[int, int]] = field(default_factory=list)
    loads: list[Linear] = field(default_factory=list)
    forward: Sequence[Linear] = ()
    backward: Sequence[Linear] = ()
    weight: Sequence[Linear] = ()
    largest: int = 0
    fill: int = 0
    pipeline: Linear | None = None
    paths: set[Counts] = field(default_factory=set)
    share_rows: list[int] = field(default_factory=list)
    chunk_rows: list[int] = field(default_factory=list)

    @functools.cached_property
    def relaxation(self) -> WarmRelaxation:
        """The program's relaxation, which is solved again as rows are added."""
        return WarmRelaxation(self.program)

    def at_least(self, target: int, expression: Linear) -> None:
        """Add the row: column ``target`` ≥ expression."""
        self.row(Linear([(target, 1.0)]).add(expression, -1.0), lower=0.0)

    def row(self, expression: Linear, *, lower: float = -math.inf, upper: float = math.inf) -> int:
        """Add lower ≤ expression ≤ upper, each column once, and return its row."""
        merged: dict[int, float] = {}
        for column, value in expression.terms:
            merged[column] = merged.get(column, 0.0) + value
        terms = [(column, value) for column, value in merged.items() if value]
        return self.program.row(terms, lower=lower - expression.constant, upper=upper - expression.constant)

    def minimise(self, expression: Linear, factor: float = 1.0) -> None:
        """Add ``factor`` times an expression to the objective."""
        for column, value in expression.terms:
            self.program.costs[column] += factor * value
        self.constant += factor * expression.constant

    def total(self, chunks: Sequence[int], value: Callable[[LayerCosts], float]) -> Linear:
        """Σ value·n over the units of some chunks."""
        return Linear(
            [(move.column, amount) for k in chunks for move in self.moves[k] if (amount := value(move.option.costs))]
        )

    def seconds(self, chunks: Sequence[int], *names: str) -> Linear:
        """Σ of the ``LayerCosts`` fields ``names`` over the units of some chunks, in the program's unit of time."""
        return self.total(chunks, lambda costs: sum(getattr(costs, name) for name in names) / self.second)

    def units(self, chunk: int, run: int) -> Linear:
        """The number of units of a run in a chunk."""
        return Linear([(move.column, 1.0) for move in self.moves[chunk] if move.run == run])


def chunks_of(problem: StageProblem) -> list[list[int]]:
    """The chunks of each rank."""
    chunks_by_rank: list[list[int]] = [[] for _ in range(problem.num_ranks)]
    for chunk, rank in enumerate(problem.ranks):
        chunks_by_rank[rank].append(chunk)
    return chunks_by_rank


def in_rounds(problem: StageProblem) -> bool:
    """Whether ranks that hold several chunks run them in rounds, each as fast as its longest chunk."""
    return SCHEDULES[problem.schedule].divided and problem.num_chunks > problem.num_ranks > 1


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


def spans(problem: StageProblem) -> list[range]:
    """The chunks in which each run may have units, since every chunk needs at least one unit."""
    ranges, start = [], 0
    for run in problem.runs:
        end = start + run.count
        first = max(0, start - (problem.num_units - problem.num_chunks))
        ranges.append(range(first, min(problem.num_chunks, end)))
        start = end
    return ranges


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


def add_tail(stage: StageProgram, backward: Sequence[Linear]) -> None:
    """(tail), (late): gradient reductions that no later backward pass hides, and the very first layer's reduction."""
    problem, program = stage.problem, stage.program
    if not problem.may_have_tail:
        return
    tail = program.variable(1.0)
    whole = float(not SCHEDULES[problem.schedule].splits_backward)
    waits = Linear().add(stage.seconds(range(problem.num_chunks), "last_wait"), whole)
    if any(factor for _, factor in waits.terms):
        stage.at_least(tail, waits)
    before = Linear()
    for chunks in chunks_of(problem):
        last_backward = Linear().add(stage.seconds(chunks, "last_wait"), whole)
        for chunk in chunks:
            last_backward.add(backward[chunk])
        costs = [move.option.costs for chunk in chunks for move in stage.moves[chunk]]
        if any(figures.last_communication - whole * figures.last_wait > figures.backward for figures in costs):
            communication = stage.seconds(chunks, "last_communication").add(waits)
            stage.at_least(tail, communication.add(last_backward, -1.0).add(before, -1.0))
        before.add(last_backward, problem.num_ranks / problem.num_chunks)
    stage.at_least(tail, _of_first(stage, "reduce_step"))
    for late in _late(stage) if problem.may_be_late else ():
        stage.at_least(tail, late.add(waits))


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
