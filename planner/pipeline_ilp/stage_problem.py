"""Where a pipeline is cut and what each unit runs as: the problem as plain data, and an answer as a step to price.

Units are what a pipeline may not cut. Equal units in a row are one run with a count, so a model of 126 layers is three
runs (embedding, layers, head) whatever the number of layers.

**Unequal ranks.** Where ranks have different devices, ``rank_runs`` has the runs as each rank r would run them: the
same units and choices c, other seconds f[r,c], b[r,c] … and received seconds. Then in every formula of
``planner.pipeline_ilp.stage_ilp`` the figures of a unit in chunk k are those on rank r(k), and

    runs: each figure the least over all ranks,   min_r f[r,c],  min_r b[r,c],  …

is a relaxation: with one chunk a rank and a whole backward pass the step

    (m-1)·max_r (f[r] + b[r]) + Σ_r (f[r] + b[r]) + tail + update     (GPipe: max_r f[r] + max_r b[r])

falls with no figure, since a second of backward shortens the tail by at most the second that it adds to the sum, and
memory does not depend on the device. Of ZB-H1, whose backward passes are split, the step is

    m·max_r (f[r] + b[r]) + (p-1)/p·Σ_r max(f[r] + b[r] - 2·W[r], f[r], b[r] - W[r]) + tail + update

which falls with W alone, and where a second of backward may shorten the tail by more than it adds: there W is the
largest over all ranks, and nothing is communicated, so that there is no tail. So whatever bounds the relaxation bounds
the problem. Loads, tables, segments and the program itself take each rank's own figures. Other schedules are refused:
their fill is that of equal ranks, or is played, or they hold two chunks a rank.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from cost_models.schedules import SCHEDULES, in_flight, in_flight_peaks, rank_of_chunk
from cost_models.step import ChunkCosts, LayerCosts, PipelineStep

#: Per chunk, in model order: (run index, choice index, how many units), in the order in which they run.
Assignment = tuple[tuple[tuple[int, int, int], ...], ...]
#: Relative slack of a memory limit: what sums of bytes may be off by.
ROUNDING = 1e-9
#: Schedules whose closed form holds where ranks are unequal, all of one chunk a rank.
UNEQUAL_SCHEDULES = ("1f1b", "gpipe", "zb_h1")
#: What is communicated beside a backward pass or behind the last.
_REDUCED = ("gather_backward", "reduce_backward", "reduce_step")
#: Columns of ``UnitRun.figures``: what the last backward communicates, what waits, and the reductions alone.
SENT, WAITS, REDUCTIONS = 3, 5, 6
#: Marks a figure that must be equal for one choice to dominate another.
SAME = 2


@dataclass(frozen=True, kw_only=True)
class FoldedCosts(LayerCosts):
    """A layer whose overlapped communication is in ``forward`` and ``backward``; ``compute``: of backward, without."""

    compute: float

    @property
    def computed_backward(self) -> float:
        """Seconds of backward without what overlaps with it."""
        return self.compute


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
        """The run with each choice's overlapped communication merged into its compute, as the closed form does.

        What is communicated beside a backward pass stays, for the tail, which it does not prolong twice.
        """
        return self._folded(split=False)

    @functools.cached_property
    def folded_split(self) -> UnitRun:
        """The same for schedules that split every backward."""
        return self._folded(split=True)

    @functools.cached_property
    def figures(self) -> NDArray[np.float64]:
        """One row for each choice: forward, backward, W, communication of the last backward, update and gather, what
        the last backward waits (column ``WAITS``) and its reductions alone (``REDUCTIONS``)."""
        return np.array(
            [
                (
                    costs.forward,
                    costs.backward,
                    costs.backward_weight,
                    costs.last_communication,
                    costs.update_step + costs.gather_step,
                    costs.last_wait,
                    costs.reductions,
                )
                for costs in (choice.costs for choice in self.choices)
            ]
        )

    @functools.cached_property
    def quickest(self) -> dict[float, NDArray[np.float64]]:
        """By largest peak, choices that are undominated in seconds and bytes (``planner.pipeline_ilp.loads``)."""
        return {}

    def _folded(self, *, split: bool) -> UnitRun:
        folded = [_fold(choice.costs, split=split) for choice in self.choices]
        if all(costs is choice.costs for costs, choice in zip(folded, self.choices)):
            return self
        choices = tuple(
            choice if costs is choice.costs else UnitChoice(label=choice.label, costs=costs)
            for choice, costs in zip(self.choices, folded)
        )
        return replace(self, choices=choices)


@dataclass(frozen=True, kw_only=True)
class StageProblem:
    """Cut ``runs`` (in model order) into ``num_chunks`` chunks and give every unit a choice.

    Attributes:
        memory: bytes usable on each pipeline rank (may be infinite).
        rank_runs: of unequal ranks, by rank, what each of ``runs`` costs there; ``runs`` is then ``least_of`` them.
    """

    runs: tuple[UnitRun, ...]
    schedule: str
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    memory: tuple[float, ...]
    rank_runs: tuple[tuple[UnitRun, ...], ...] = ()

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
        if self.rank_runs:
            self._check_unequal()

    def _check_unequal(self) -> None:
        if self.schedule not in UNEQUAL_SCHEDULES or self.num_chunks != self.num_ranks:
            raise ValueError(
                f"schedule {self.schedule!r} with {self.num_chunks} chunks on {self.num_ranks} unequal ranks: expected "
                f"one chunk a rank under {' or '.join(UNEQUAL_SCHEDULES)}"
            )
        shapes = {tuple((run.count, len(run.choices)) for run in runs) for runs in (self.runs, *self.rank_runs)}
        if len(self.rank_runs) != self.num_ranks or len(shapes) > 1:
            raise ValueError("rank_runs: expected the same units and choices on every rank, once for each rank")

    def runs_on(self, rank: int) -> tuple[UnitRun, ...]:
        """The runs with what they cost on a rank."""
        return self.rank_runs[rank] if self.rank_runs else self.runs

    @property
    def may_have_tail(self) -> bool:
        """Whether reductions of any choice may outlast the last backward."""
        every_run = (run for runs in (self.rank_runs or (self.runs,)) for run in runs)
        every_choice = (choice.costs for run in every_run for choice in run.choices)
        each_time = self.may_be_late or SCHEDULES[self.schedule].ends_in_weights
        return any(costs.reduce_step > 0 or (each_time and costs.reduce_backward > 0) for costs in every_choice)

    @property
    def may_be_late(self) -> bool:
        """Whether reductions of each micro-batch, too, may outlast the last backward (``cost_models.step_time``)."""
        return self.num_chunks == 1 and not SCHEDULES[self.schedule].splits_backward

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

    @functools.cached_property
    def folded(self) -> StageProblem:
        """The problem with all its runs folded, which every bound asks for."""
        return _folded(self)

    @functools.cached_property
    def undominated(self) -> tuple[StageProblem, tuple[tuple[int, ...], ...]]:
        """See the function of this name."""
        return _without_dominated(self)


def folded(problem: StageProblem) -> StageProblem:
    """The problem with all its runs folded."""
    return problem.folded


def _folded(problem: StageProblem) -> StageProblem:
    split = SCHEDULES[problem.schedule].splits_all

    def folded_runs(runs: Sequence[UnitRun]) -> tuple[UnitRun, ...]:
        return tuple(run.folded_split if split else run.folded for run in runs)

    if problem.rank_runs:
        rank_runs = tuple(map(folded_runs, problem.rank_runs))
        return replace(problem, runs=least_of(rank_runs, split=split), rank_runs=rank_runs)
    return replace(problem, runs=folded_runs(problem.runs))


def least_of(rank_runs: Sequence[Sequence[UnitRun]], *, split: bool = False) -> tuple[UnitRun, ...]:
    """Runs with the least of each figure over all ranks: a relaxation, see the module docstring (``split``: under a
    schedule that splits every backward pass)."""
    names = [figure.name for figure in fields(LayerCosts)]

    def choice(options: tuple[UnitChoice, ...]) -> UnitChoice:
        least = {name: min(getattr(option.costs, name) for option in options) for name in names}
        costs = FoldedCosts(**least, compute=min(option.costs.computed_backward for option in options))
        if split:
            most = max(option.costs.backward_weight for option in options)
            costs = replace(costs, backward_weight=most, **dict.fromkeys(_REDUCED, 0.0))
        return replace(options[0], costs=costs)

    return tuple(
        replace(
            alike[0],
            choices=tuple(map(choice, zip(*{id(run.choices): run.choices for run in alike}.values(), strict=True))),
            receive_forward=min(run.receive_forward for run in alike),
            receive_backward=min(run.receive_backward for run in alike),
        )
        for alike in zip(*rank_runs, strict=True)
    )


def _fold(costs: LayerCosts, *, split: bool) -> LayerCosts:
    if not (costs.gather_forward or costs.gather_backward or costs.reduce_backward):
        return costs
    backward, weight = costs.split_seconds if split else (costs.backward_seconds, costs.backward_weight)
    return FoldedCosts(  # not by ``replace``, which takes three times as long
        compute=costs.computed_backward,
        forward=costs.forward_seconds,
        backward=backward,
        backward_weight=weight,
        gather_forward=0.0,
        gather_backward=costs.gather_backward,
        reduce_backward=costs.reduce_backward,
        reduce_step=costs.reduce_step,
        update_step=costs.update_step,
        gather_step=costs.gather_step,
        state_bytes=costs.state_bytes,
        saved_bytes=costs.saved_bytes,
        peak_bytes=costs.peak_bytes,
        host_bytes=costs.host_bytes,
    )


def as_step(problem: StageProblem, assignment: Assignment) -> PipelineStep:
    """The pipeline that ``assignment`` describes."""
    ranks = problem.ranks
    chunks = []
    for rank, groups in zip(ranks, assignment):
        runs = problem.runs_on(rank)
        layers = tuple((runs[run].choices[choice].costs, n) for run, choice, n in groups)
        chunks.append(ChunkCosts(layers=layers, rows=tuple(run for run, _, _ in groups)))
    for chunk in range(1, len(chunks)):
        if ranks[chunk] != ranks[chunk - 1]:
            cut = assignment[chunk][0][0]
            received, returned = problem.runs_on(ranks[chunk])[cut], problem.runs_on(ranks[chunk - 1])[cut]
            chunks[chunk] = replace(chunks[chunk], receive_forward=received.receive_forward)
            chunks[chunk - 1] = replace(chunks[chunk - 1], receive_backward=returned.receive_backward)
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

    A choice is dominated if another one beats or equals it in every figure (on every rank).
    """
    return problem.undominated


def _without_dominated(problem: StageProblem) -> tuple[StageProblem, tuple[tuple[int, ...], ...]]:
    better = _directions(problem)
    by_rank = list({tuple(id(run.choices) for run in runs): runs for runs in problem.rank_runs}.values())
    by_rank = by_rank or [problem.runs]
    indices_by_run = tuple(_undominated([run.choices for run in alike], better) for alike in zip(*by_rank))

    reduced: dict[tuple[int, int], UnitRun] = {}

    def remaining(runs: Sequence[UnitRun]) -> tuple[UnitRun, ...]:
        for place, (run, indices) in enumerate(zip(runs, indices_by_run)):
            if (place, id(run)) not in reduced:  # ranks that are alike share their runs
                reduced[place, id(run)] = replace(run, choices=tuple(run.choices[index] for index in indices))
        return tuple(reduced[place, id(run)] for place, run in enumerate(runs))

    rank_runs = tuple(map(remaining, problem.rank_runs))
    return replace(problem, runs=remaining(problem.runs), rank_runs=rank_runs), indices_by_run


def _directions(problem: StageProblem) -> dict[str, int]:
    """For each figure of a ``folded`` problem: whether less is better (1), more is better (-1), neither matters (0), or
    SAME if either may."""
    better = {figure.name: 1 for figure in fields(LayerCosts)}
    schedule = SCHEDULES[problem.schedule]
    plain = problem.num_ranks == 1 or not schedule.splits_backward
    signs = {_sign(on_weight - on_inputs) for _, on_inputs, on_weight in schedule.fills} - {0}
    # delayed weight gradients may fill bubbles; where nothing is delayed they change nothing
    better["backward_weight"] = 0 if plain or not signs else SAME if len(signs) > 1 else signs.pop()
    if schedule.played and not plain:
        better["backward_weight"] = SAME  # a path through the order may wait for either part of a backward pass
    if schedule.ends_in_weights and not plain and problem.may_have_tail:
        better["backward_weight"] = SAME  # they hide a rank's reductions, and take from what hides other ranks'
    longer_backward_may_help = any(on_inputs < 0 for _, on_inputs, _ in schedule.fills)
    # what a backward communicates besides only matters to reductions after the last one, which wait for it
    better |= dict.fromkeys(("gather_backward", "reduce_backward"), int(problem.may_have_tail))
    better["computed_backward"] = int(problem.may_be_late)
    if problem.num_ranks > 1 and (schedule.divided or not plain):
        # a longer backward hides more of the reduction, and here it may cost the pipeline less than that
        longer_backward_may_help |= problem.may_have_tail
    if longer_backward_may_help:
        better["backward"] = SAME
    if any(on_forward < 0 for on_forward, _, _ in schedule.fills):
        better["forward"] = SAME
    return better


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _undominated(by_rank: Sequence[Sequence[UnitChoice]], better: Mapping[str, int]) -> tuple[int, ...]:
    """Indices of the choices that no other dominates; ``by_rank``: the same choices on ranks that differ."""
    same, signs = ({name: sign for name, sign in better.items() if (sign == SAME) == is_same} for is_same in (1, 0))
    choices = list(zip(*by_rank))
    keys = [tuple(getattr(choice.costs, name) for choice in ranks for name in same) for ranks in choices]
    values = [
        tuple(sign * getattr(choice.costs, name) for choice in ranks for name, sign in signs.items())
        for ranks in choices
    ]

    def beats(first: int, second: int) -> bool:
        if keys[first] != keys[second] or any(a > b for a, b in zip(values[first], values[second])):
            return False
        return first < second or values[first] != values[second]

    everyone = range(len(choices))
    return tuple(index for index in everyone if not any(beats(other, index) for other in everyone if other != index))
