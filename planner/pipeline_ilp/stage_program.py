"""The stage program as arrays, which ``stage_rows`` fills, and sums over its units."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
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
        plain = factor == 1.0  # most are, and copying takes a tenth of multiplying
        self.terms.extend(other.terms if plain else [(column, factor * value) for column, value in other.terms])
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
        merged = dict(expression.terms)
        if len(merged) < len(expression.terms):
            merged = dict.fromkeys(merged, 0.0)
            for column, value in expression.terms:
                merged[column] += value
        if not all(merged.values()):
            merged = {column: value for column, value in merged.items() if value}
        lower, upper = lower - expression.constant, upper - expression.constant
        return self.program.row_of(merged.keys(), merged.values(), lower=lower, upper=upper)

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


def spans(problem: StageProblem) -> list[range]:
    """The chunks in which each run may have units, since every chunk needs at least one unit."""
    ranges, start = [], 0
    for run in problem.runs:
        end = start + run.count
        first = max(0, start - (problem.num_units - problem.num_chunks))
        ranges.append(range(first, min(problem.num_chunks, end)))
        start = end
    return ranges
