"""Which weights units gather and reduce together, without tensors: planning counts by it, ranks run by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from passes.ir.graph import Graph
from passes.pipeline_cut import StageGraph, StepPrograms
from passes.pipeline_cut.step_programs import StageUnit
from passes.plan import Plan

if TYPE_CHECKING:
    from runtime.zero.unit import Unit

#: The ZeRO stage from which on weights are gathered for every use.
GATHERED_PER_USE = 3


class UnitTable:
    """The units of a rank, made for its training programs and shared by all others.

    A weight that several of the rank's units use, and that one of them keeps, is a unit of its own, so that it and its
    gradient are held once.
    """

    def __init__(self) -> None:
        self._exact: dict[tuple[int | None, int, tuple[str, ...]], Unit] = {}
        self._of: dict[tuple[int, str], tuple[Unit, tuple[str, ...]]] = {}
        #: ZeRO stage of every weight that several units hold together.
        self.held_together: dict[str, int] = {}
        #: Weights that several units gather for each use.
        self.gathered_apart: set[str] = set()

    def __len__(self) -> int:
        return len(self._exact)

    def hold_together(self, stages: Sequence[StageGraph]) -> None:
        """Find the weights that several units of a rank's chunks use."""
        uses: dict[str, list[int]] = {}
        for unit in (unit for stage in stages for unit in stage.all_units):
            for path in {path: None for _, _, path in unit.states}:
                uses.setdefault(path, []).append(unit.policy.zero)
        for path, zeros in uses.items():
            if len(zeros) > 1 and min(zeros) < GATHERED_PER_USE:
                self.held_together[path] = min(max(zeros), GATHERED_PER_USE - 1)
            elif len(zeros) > 1:
                self.gathered_apart.add(path)

    def add(self, chunk: int, zero: int, names: tuple[str, ...], make: Callable[[], Unit]) -> Unit:
        """The unit of a training program."""
        together = len(names) == 1 and names[0] in self.held_together
        key = (None if together else chunk, zero, names)
        if key not in self._exact:
            self._exact[key] = make()
        for name in names:
            self._of.setdefault((chunk, name), (self._exact[key], names))
        return self._exact[key]

    def lacks(self, chunk: int, name: str) -> bool:
        """Whether no unit of a chunk holds a weight: no training program of the chunk uses it."""
        return (chunk, name) not in self._of

    def find(self, chunk: int, names: tuple[str, ...]) -> list[tuple[Unit, tuple[str, ...]]]:
        """The units that hold ``names``, each once."""
        by_unit = {}
        for name in names:
            unit, unit_names = self._of[chunk, name]
            by_unit[id(unit)] = (unit, unit_names)
        return list(by_unit.values())


def weight_groups(
    stage_unit: StageUnit, trained: Mapping[str, tuple[str, ...]], held_together: Mapping[str, int]
) -> list[tuple[tuple[str, ...], int]]:
    """The ``trained`` weights of a unit that are gathered and reduced together, each group with its ZeRO stage.

    Args:
        trained: by name, the axes over which the gradient is summed: weights of the same axes go together.
    """
    names_by_axes: dict[tuple[str, ...], list[str]] = {}
    for name, axes in trained.items():
        if name not in held_together:
            names_by_axes.setdefault(axes, []).append(name)
    groups = [(tuple(names), stage_unit.policy.zero) for names in names_by_axes.values()]
    groups += [((name,), held_together[name]) for name in trained if name in held_together]
    return groups or [((), stage_unit.policy.zero)]


def takes_totals(input_paths: Iterable[tuple[str | int, ...]], totals: Graph) -> bool:
    """Whether a chunk with these inputs takes a total that ``totals`` computes."""
    return any(path[0] == "total" and path[1] in totals.outputs for path in input_paths)


def stages_of(plan: Plan, programs: StepPrograms) -> dict[str, tuple[int, ...]]:
    """State path → pipeline ranks whose programs use it."""
    users: dict[str, set[int]] = {}
    totals = programs.totals.graph if programs.totals is not None else None
    for stage in (*programs.stages, *programs.counting):
        graph, rank = stage.sharded.graph, plan.step.chunks[stage.index].rank
        counted_here = () if totals is None or not takes_totals(graph.input_paths, totals) else totals.states
        for state in (*graph.states, *counted_here):
            users.setdefault(state.path, set()).add(rank)
    return {path: tuple(sorted(ranks)) for path, ranks in users.items()}


def sharded_paths(programs: StepPrograms) -> frozenset[str]:
    """Paths of the states that some unit shards over its data ranks, with all others of their units.

    A unit gathers all of its parameters or none, so one that is sharded for another unit's sake takes the rest along.
    """
    units = [
        (unit.policy.zero, frozenset(path for _, _, path in unit.states))
        for stage in programs.stages
        for unit in stage.all_units
    ]
    in_pieces: set[str] = set()
    for _ in units:
        before = len(in_pieces)
        for zero, paths in units:
            if zero or paths & in_pieces:
                in_pieces |= paths
        if len(in_pieces) == before:
            break
    return frozenset(in_pieces)
