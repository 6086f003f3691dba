"""Where a pipeline is cut and what each unit runs as: the problem as plain data, and an answer as a step to price.

Units are what a pipeline may not cut. Equal units in a row are one run with a count, so a model of 126 layers is three
runs (embedding, layers, head) whatever the number of layers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from cost_models.schedules import SCHEDULES, in_flight, in_flight_peaks, rank_of_chunk
from cost_models.step import ChunkCosts, LayerCosts, PipelineStep

#: Per chunk, in model order: (run index, choice index, how many units), in the order in which they run.
Assignment = tuple[tuple[tuple[int, int, int], ...], ...]
#: Relative slack of a memory limit: what sums of bytes may be off by.
ROUNDING = 1e-9
#: Marks a figure that must be equal for one choice to dominate another.
SAME = 2


@dataclass(frozen=True, kw_only=True)
class UnitChoice:
    """One way to run a unit.

    ``label`` are names for people, such as (recompute, ZeRO stage).
    """

    label: tuple[str, ...]
    costs: LayerCosts


@dataclass(frozen=True, kw_only=True)
class UnitRun:
    """``count`` identical units in a row.

    ``receive_forward`` and ``receive_backward`` are seconds to carry one micro-batch over the boundary before a unit of
    this run, where that boundary lies between two ranks: activations, paid by the chunk that begins there, and their
    gradients, paid by the chunk before it.
    """

    name: str
    count: int
    choices: tuple[UnitChoice, ...]
    receive_forward: float = 0.0
    receive_backward: float = 0.0

    @functools.cached_property
    def folded(self) -> UnitRun:
        """The run with each choice's overlapped communication merged into its compute, as the closed form does."""
        return self._folded(split=False)

    @functools.cached_property
    def folded_split(self) -> UnitRun:
        """The same for schedules that split every backward."""
        return self._folded(split=True)

    def _folded(self, *, split: bool) -> UnitRun:
        folded = [_fold(choice.costs, split=split) for choice in self.choices]
        if all(costs is choice.costs for costs, choice in zip(folded, self.choices)):
            return self
        return replace(self, choices=tuple(replace(choice, costs=costs) for choice, costs in zip(self.choices, folded)))


@dataclass(frozen=True, kw_only=True)
class StageProblem:
    """Cut ``runs`` (in model order) into ``num_chunks`` chunks and give every unit a choice.

    Attributes:
        memory: bytes usable on each pipeline rank (may be infinite).
    """

    runs: tuple[UnitRun, ...]
    schedule: str
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    memory: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise ValueError for an inconsistent problem."""
        if self.schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {self.schedule!r}: expected one of {', '.join(SCHEDULES)}")
        if self.num_ranks < 1 or self.num_microbatches < 1 or self.num_chunks % self.num_ranks or not self.num_chunks:
            raise ValueError(
                f"{self.num_chunks} chunks on {self.num_ranks} ranks with {self.num_microbatches} micro-batches: "
                "expected positive numbers, and the chunks a multiple of the ranks"
            )
        if len(self.memory) != self.num_ranks:
            raise ValueError(f"memory has {len(self.memory)} entries: expected one for each of {self.num_ranks} ranks")
        for run in self.runs:
            if run.count < 1 or not run.choices:
                raise ValueError(
                    f"run {run.name!r} has {run.count} units and {len(run.choices)} choices: expected some"
                )
        if not self.runs:
            raise ValueError("a stage problem needs at least one run of units")

    @property
    def num_units(self) -> int:
        """Number of units of all runs; with fewer units than chunks the problem is infeasible."""
        return sum(run.count for run in self.runs)

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each chunk."""
        return tuple(
            rank_of_chunk(self.schedule, chunk, num_ranks=self.num_ranks, num_chunks=self.num_chunks)
            for chunk in range(self.num_chunks)
        )

    @functools.cached_property
    def moments(self) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
        """By rank, the moments at which its saved activations may peak: (chunk, micro-batches in flight) each."""
        return in_flight_peaks(
            self.schedule,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            num_chunks=self.num_chunks,
        )

    @functools.cached_property
    def in_flight(self) -> tuple[float, ...]:
        """Micro-batches whose saved activations each chunk holds at the first of ``moments`` of its rank."""
        return in_flight(
            self.schedule,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            num_chunks=self.num_chunks,
        )


def folded(problem: StageProblem) -> StageProblem:
    """The problem with all its runs folded."""
    split = SCHEDULES[problem.schedule].splits_all
    return replace(problem, runs=tuple(run.folded_split if split else run.folded for run in problem.runs))


def _fold(costs: LayerCosts, *, split: bool) -> LayerCosts:
    if not (costs.gather_forward or costs.gather_backward or costs.reduce_backward):
        return costs
    backward, weight = costs.split_seconds if split else (costs.backward_seconds, costs.backward_weight)
    return replace(
        costs,
        forward=costs.forward_seconds,
        backward=backward,
        backward_weight=weight,
        gather_forward=0.0,
        gather_backward=0.0,
        reduce_backward=0.0,
    )


def as_step(problem: StageProblem, assignment: Assignment) -> PipelineStep:
    """The pipeline that ``assignment`` describes."""
    ranks = problem.ranks
    chunks = [
        ChunkCosts(layers=tuple((problem.runs[run].choices[choice].costs, count) for run, choice, count in groups))
        for groups in assignment
    ]
    for chunk in range(1, len(chunks)):
        if ranks[chunk] != ranks[chunk - 1]:
            run_of_cut = problem.runs[assignment[chunk][0][0]]
            chunks[chunk] = replace(chunks[chunk], receive_forward=run_of_cut.receive_forward)
            chunks[chunk - 1] = replace(chunks[chunk - 1], receive_backward=run_of_cut.receive_backward)
    return PipelineStep(
        schedule=problem.schedule,
        num_microbatches=problem.num_microbatches,
        num_ranks=problem.num_ranks,
        chunks=tuple(chunks),
    )


def fits(problem: StageProblem, memory: Sequence[float]) -> bool:
    """Whether the bytes per rank are within the problem's memory (up to rounding)."""
    return all(used <= limit * (1 + ROUNDING) for used, limit in zip(memory, problem.memory))


def relabelled(assignment: Assignment, original: Sequence[Sequence[int]]) -> Assignment:
    """An assignment of a problem with fewer choices, its choice indices mapped back by ``original``."""
    return tuple(tuple((run, original[run][choice], count) for run, choice, count in groups) for groups in assignment)


def undominated(problem: StageProblem) -> tuple[StageProblem, tuple[tuple[int, ...], ...]]:
    """The problem without dominated choices, and for each run the original index of each remaining choice.

    A choice is dominated if another one beats or equals it in every figure.
    """
    better = _directions(problem)
    indices_by_run = tuple(_undominated(run.choices, better) for run in problem.runs)
    runs = tuple(
        replace(run, choices=tuple(run.choices[index] for index in indices))
        for run, indices in zip(problem.runs, indices_by_run)
    )
    return replace(problem, runs=runs), indices_by_run


def _directions(problem: StageProblem) -> dict[str, int]:
    """For each figure: whether less is better (1), more is better (-1), neither matters (0), or SAME if either may."""
    better = {figure.name: 1 for figure in fields(LayerCosts)}
    schedule = SCHEDULES[problem.schedule]
    fill_forward, fill_backward, fill_weight = schedule.fill
    plain = problem.num_ranks == 1 or not schedule.splits_backward
    # delayed weight gradients may fill bubbles; where nothing is delayed they change nothing
    better["backward_weight"] = 0 if plain else _sign(fill_weight - fill_backward)
    if schedule.order is not None and not plain:
        better["backward_weight"] = SAME  # its order says which of the two parts of a backward pass ranks wait for
    longer_backward_may_help = fill_backward < 0
    if problem.num_ranks > 1 and (schedule.divided or not plain):
        # a longer backward hides more of the reduction, and here it may cost the pipeline less than that
        longer_backward_may_help |= any(choice.costs.reduce_step for run in problem.runs for choice in run.choices)
    if longer_backward_may_help:
        better |= dict.fromkeys(("backward", "gather_backward", "reduce_backward"), SAME)
    if fill_forward < 0:
        better |= dict.fromkeys(("forward", "gather_forward"), SAME)
    return better


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _undominated(choices: Sequence[UnitChoice], better: Mapping[str, int]) -> tuple[int, ...]:
    keys = [tuple(getattr(choice.costs, name) for name, sign in better.items() if sign == SAME) for choice in choices]
    values = [
        tuple(sign * getattr(choice.costs, name) for name, sign in better.items() if sign != SAME) for choice in choices
    ]

    def beats(first: int, second: int) -> bool:
        if keys[first] != keys[second] or any(a > b for a, b in zip(values[first], values[second])):
            return False
        return first < second or values[first] != values[second]

    everyone = range(len(choices))
    return tuple(index for index in everyone if not any(beats(other, index) for other in everyone if other != index))
