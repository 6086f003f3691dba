"""Where a pipeline is cut and what each unit runs as: the problem as plain data, and an answer as a step to price.

Units are what a pipeline may not cut. Equal units in a row are one run with a count, so a model of 126 layers is three
runs (embedding, layers, head) whatever the number of layers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from cost_models.schedules import SCHEDULES, in_flight, rank_of_chunk
from cost_models.step import Chunk, LayerCosts, PipelineStep

#: Per chunk, in model order: (run index, choice index, how many units), in the order in which they run.
Assignment = tuple[tuple[tuple[int, int, int], ...], ...]
#: Relative slack of a memory limit: what sums of bytes may be off by.
ROUNDING = 1e-9
#: A figure in which one choice can only beat another if they agree.
SAME = 2


@dataclass(frozen=True, kw_only=True)
class UnitChoice:
    """One way to run a unit.

    ``label`` are names for people, such as (variant, recompute, ZeRO stage); ``entry`` and ``exit`` the kinds of the
    boundary it takes and gives (the types of the tensors carried over it).
    """

    label: tuple[str, ...]
    costs: LayerCosts
    entry: str = ""
    exit: str = ""


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
        """The run with each choice's hidden communication in its compute: what the closed form makes of the two."""
        return self._folded(split=False)

    @functools.cached_property
    def folded_split(self) -> UnitRun:
        """The same for schedules that split every backward."""
        return self._folded(split=True)

    def _folded(self, *, split: bool) -> UnitRun:
        folded = [_fold(choice.costs, split=split) for choice in self.choices]
        if all(costs is choice.costs for costs, choice in zip(folded, self.choices)):
            return self
        return replace(self, choices=tuple(replace(each, costs=costs) for each, costs in zip(self.choices, folded)))


@dataclass(frozen=True, kw_only=True)
class StageProblem:
    """Cut ``runs`` (in model order) into ``num_chunks`` chunks and give every unit a choice.

    Attributes:
        memory: bytes usable on each pipeline rank (may be infinite).
        conversions: (kind given, kind taken) → seconds forward and backward of one micro-batch. Equal kinds cost
            nothing; two different kinds that are missing here cannot be neighbours.
    """

    runs: tuple[UnitRun, ...]
    schedule: str
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    memory: tuple[float, ...]
    conversions: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError for a problem that says nothing sensible."""
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
        """Units of all runs together; with fewer units than chunks there is no answer."""
        return sum(run.count for run in self.runs)

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each chunk."""
        return tuple(
            rank_of_chunk(self.schedule, chunk, num_ranks=self.num_ranks, num_chunks=self.num_chunks)
            for chunk in range(self.num_chunks)
        )

    @functools.cached_property
    def in_flight(self) -> tuple[float, ...]:
        """Micro-batches whose saved activations each chunk holds when its rank's memory peaks."""
        return in_flight(
            self.schedule,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            num_chunks=self.num_chunks,
        )

    def conversion(self, given: str | None, taken: str) -> tuple[float, float] | None:
        """Seconds (forward, backward) from one kind to another, None if they cannot meet; at the start free."""
        if given is None or given == taken:
            return (0.0, 0.0)
        return self.conversions.get((given, taken))


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
    """The pipeline that ``assignment`` describes; conversions are layers of no memory in the chunk that pays them.

    Raises:
        ValueError: if two neighbours have kinds without a conversion.
    """
    chunks: list[Chunk] = []
    given: str | None = None
    ranks = problem.ranks
    for groups in assignment:
        layers: list[tuple[LayerCosts, int]] = []
        for run, choice, count in groups:
            chosen = problem.runs[run].choices[choice]
            layers.extend(_conversions(problem, given, chosen, 1))
            layers.append((chosen.costs, count))
            layers.extend(_conversions(problem, chosen.exit, chosen, count - 1))
            given = chosen.exit
        chunks.append(Chunk(layers=tuple(layers)))
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
    """Whether bytes per rank are within the problem's memory (up to rounding)."""
    return all(used <= limit * (1 + ROUNDING) for used, limit in zip(memory, problem.memory))


def without_kinds(problem: StageProblem) -> StageProblem:
    """The problem with every boundary alike, so that nothing is converted: never slower to solve or to run."""
    runs = tuple(
        replace(run, choices=tuple(replace(choice, entry="", exit="") for choice in run.choices))
        for run in problem.runs
    )
    return replace(problem, runs=runs)


def of_kind(problem: StageProblem, kind: str) -> tuple[StageProblem | None, tuple[tuple[int, ...], ...]]:
    """The problem with only the choices of one kind (None if a run has none), and where they are from."""
    kept = tuple(
        tuple(index for index, choice in enumerate(run.choices) if choice.entry == choice.exit == kind)
        for run in problem.runs
    )
    if not all(kept):
        return None, kept
    return _with_choices(problem, kept), kept


def relabelled(assignment: Assignment, kept: Sequence[Sequence[int]]) -> Assignment:
    """An assignment of a problem with fewer choices, in terms of the problem that ``kept`` says they are from."""
    return tuple(tuple((run, kept[run][choice], count) for run, choice, count in groups) for groups in assignment)


def _with_choices(problem: StageProblem, kept: Sequence[Sequence[int]]) -> StageProblem:
    runs = tuple(
        replace(run, choices=tuple(run.choices[index] for index in indices)) for run, indices in zip(problem.runs, kept)
    )
    return replace(problem, runs=runs)


def undominated(problem: StageProblem) -> tuple[StageProblem, tuple[tuple[int, ...], ...]]:
    """The problem without choices that another one beats or equals in every figure, and where the rest come from.

    The second value gives, for each run, the original index of each choice kept.
    """
    better = _directions(problem)
    kept = tuple(_undominated(run.choices, better) for run in problem.runs)
    return _with_choices(problem, kept), kept


def _conversions(
    problem: StageProblem, given: str | None, chosen: UnitChoice, count: int
) -> Iterator[tuple[LayerCosts, int]]:
    """The pseudo layers of ``count`` conversions before ``chosen``: none where they are free."""
    if count == 0:
        return
    seconds = problem.conversion(given, chosen.entry)
    if seconds is None:
        raise ValueError(f"no conversion from {given!r} to {chosen.entry!r}: units of these kinds cannot be neighbours")
    if any(seconds):
        yield LayerCosts(forward=seconds[0], backward=seconds[1]), count


def _directions(problem: StageProblem) -> dict[str, int]:
    """For each figure what is better: less (1), more (-1), indifferent (0), or SAME where either may help."""
    better = {figure.name: 1 for figure in fields(LayerCosts)}
    schedule = SCHEDULES[problem.schedule]
    fill_forward, fill_backward, fill_weight = schedule.fill
    plain = problem.num_ranks == 1 or not schedule.splits_backward
    # delayed weight gradients may fill bubbles; where nothing is delayed they change nothing
    better["backward_weight"] = 0 if plain else _sign(fill_weight - fill_backward)
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
    keys = [
        (
            choice.entry,
            choice.exit,
            *(getattr(choice.costs, name) for name, sign in better.items() if sign == SAME),
        )
        for choice in choices
    ]
    values = [
        tuple(sign * getattr(choice.costs, name) for name, sign in better.items() if sign != SAME) for choice in choices
    ]

    def beats(first: int, second: int) -> bool:
        if keys[first] != keys[second] or any(a > b for a, b in zip(values[first], values[second])):
            return False
        return first < second or values[first] != values[second]

    everyone = range(len(choices))
    return tuple(index for index in everyone if not any(beats(other, index) for other in everyone if other != index))
