"""Units of an emitted program bound to their weights: what ``self.unit(Block(...))`` of a chunk's program does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from passes.pipeline_cut import StageGraph
from passes.pipeline_cut.step_programs import StageUnit
from passes.torch_compat.module_tables import buffers_of
from runtime import ops
from runtime.execution.state_info import StateInfo
from runtime.execution.step_state import StepState
from runtime.program_tools.compiling import as_compiled, can_be_one_graph
from runtime.program_tools.recompute import always_again, recomputed
from runtime.programs.program import Block
from runtime.state.weight_tree import WeightTree
from runtime.torch_compat.spmd_internals import mesh_of_thread, use_mesh
from runtime.zero.group import StateGroup
from runtime.zero.unit import Unit, UnitWeight

#: The ZeRO stage from which on weights are gathered for every use.
_GATHERED_PER_USE = 3


class BoundUnit:
    """One unit of a chunk: gathers its weights into trees that look like the model's, and runs a block with them.

    Args:
        units: what gathers them, each with the full names of its weights in order. Usually one; several where a call
            is cut into other units than training.
        fixed: the unit's other tensors, by full name.

    Attributes:
        keeps_weights: whether autograd may keep the working weights: they are there all the time.
    """

    def __init__(
        self, stage_unit: StageUnit, units: Sequence[tuple[Unit, Sequence[str]]], fixed: dict[str, torch.Tensor]
    ) -> None:
        self.units = tuple(unit for unit, _ in units)
        self.keeps_weights = all(unit.zero < _GATHERED_PER_USE for unit in self.units)
        self._names = tuple(name for _, names in units for name in names)
        count = 1 + max((root for root, _, _ in stage_unit.states), default=0)
        self.trees = [WeightTree() for _ in range(count)]
        slots: dict[str, list[tuple[dict[str, Any], str]]] = {}
        for root, path, full in stage_unit.states:
            self.trees[root].put(path, fixed.get(full))
            if full not in fixed:
                parent, _, name = path.rpartition(".")
                node = self.trees[root].find(parent) if parent else self.trees[root]
                slots.setdefault(full, []).append((node.__dict__, name))
        self._slots = [slots.get(name, []) for name in self._names]
        for tree in self.trees:
            tree.look_up_at_once()
        #: Whether what a block uses are the owners themselves, always the same.
        self._are_owners = all(unit.uses_owners for unit in self.units)
        self._is_filled = False

    def run(self, block: Block, *tensors: torch.Tensor, forward: Callable[..., Any] | None = None) -> Any:
        """The block's outputs, with weights gathered for this run alone; ``forward`` runs it in another way."""
        if not (self._are_owners and self._is_filled):
            self._fill(self._weights())
        block.weights = self.trees[0] if len(self.trees) == 1 else tuple(self.trees)
        try:
            return (forward or block.forward)(*tensors)
        finally:
            if not self._are_owners:
                self._fill([None] * len(self._slots))

    def _fill(self, weights: Sequence[torch.Tensor | None]) -> None:
        for slots, weight in zip(self._slots, weights):
            for table, name in slots:
                table[name] = weight
        self._is_filled = True

    def lend(self, tree: WeightTree) -> None:
        """Put the weights into a program's own tree for operators outside of its units."""
        for path, weight in zip(self._names, self._weights()):
            tree.put(path, None)
            parent, _, name = path.rpartition(".")
            buffers_of(tree.find(parent) if parent else tree)[name] = weight

    def _weights(self) -> list[torch.Tensor]:
        with always_again():
            return [weight for unit in self.units for weight in unit.use()]


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
            if len(zeros) > 1 and min(zeros) < _GATHERED_PER_USE:
                self.held_together[path] = min(max(zeros), _GATHERED_PER_USE - 1)
            elif len(zeros) > 1:
                self.gathered_apart.add(path)

    def in_turn(self, units: Sequence[Unit]) -> list[Unit]:
        """The members of ``units`` that a micro-batch uses exactly once."""
        several = {id(unit) for (chunk, _, _), unit in self._exact.items() if chunk is None}
        return [unit for unit in units if id(unit) not in several]

    def add(self, chunk: int, zero: int, names: tuple[str, ...], make: Callable[[], Unit]) -> Unit:
        """The unit of a training program."""
        together = len(names) == 1 and names[0] in self.held_together
        key = (None if together else chunk, zero, names)
        if key not in self._exact:
            self._exact[key] = make()
        for name in names:
            self._of.setdefault((chunk, name), (self._exact[key], names))
        return self._exact[key]

    def find(self, chunk: int, names: tuple[str, ...]) -> list[tuple[Unit, tuple[str, ...]]]:
        """The units that hold ``names``, each once; a training program of this chunk uses them all."""
        by_unit = {}
        for name in names:
            unit, unit_names = self._of[chunk, name]
            by_unit[id(unit)] = (unit, unit_names)
        return list(by_unit.values())


class ChunkUnits:
    """Hands out the units of one chunk in the order in which its program runs them.

    Args:
        compiled_on: the mesh that blocks are compiled for by ``torch.compile``; None to run them as they are.
    """

    def __init__(self, bound: Sequence[BoundUnit], *, compiled_on: DeviceMesh | None = None) -> None:
        self.bound = tuple(bound)
        self.compiled_on = compiled_on
        self._next = 0

    def restart(self) -> None:
        """A new run of the program."""
        self._next = 0

    def __call__(self, block: Block, recompute: str) -> Callable[..., Any]:
        bound = self.bound[self._next]
        self._next += 1

        # What recomputes inside of a compiled block is in its graph. Weights gathered for each use stay outside of it,
        # and a block of several graphs runs again as a whole, with its weights.
        inside = self.compiled_on is not None and bound.keeps_weights and can_be_one_graph(block)
        forward = self._compiled(block, recompute if inside else "none", whole=inside or recompute in ("none", "full"))
        outside = "none" if inside else recompute

        if not torch.is_grad_enabled() or (outside == "none" and bound.keeps_weights):  # Runs once, here and now.
            return functools.partial(bound.run, block, forward=forward)
        microbatch, mesh, device = ops.current_microbatch(), mesh_of_thread(), torch.get_default_device()

        def run(*tensors: torch.Tensor) -> Any:
            on_device = contextlib.nullcontext() if device.type == "cpu" else device
            with ops.in_microbatch(microbatch), use_mesh(mesh), on_device:
                return bound.run(block, *tensors, forward=forward)

        return recomputed(run, outside, gathers_weights=not bound.keeps_weights)

    def _compiled(self, block: Block, recompute: str, *, whole: bool) -> Callable[..., Any] | None:
        if self.compiled_on is None or not whole:
            return None
        return as_compiled(block, self.compiled_on, recompute=recompute)


def make_units(
    stage: StageGraph, state: StepState, literals: dict[str, torch.Tensor], table: UnitTable, *, training: bool
) -> tuple[list[BoundUnit], BoundUnit | None]:
    """The units of a chunk, and one for what its program uses outside of them (None if there is nothing).

    Args:
        table: units that are there; those of a training program are added.
    """
    bound = [_bind(unit, stage.index, state, literals, table, training=training) for unit in stage.all_units]
    return bound[: len(stage.units)], bound[-1] if len(bound) > len(stage.units) else None


def _bind(
    stage_unit: StageUnit,
    chunk: int,
    state: StepState,
    literals: dict[str, torch.Tensor],
    table: UnitTable,
    *,
    training: bool,
) -> BoundUnit:
    trained, fixed = dict[str, StateInfo](), dict[str, torch.Tensor]()
    for _, _, path in stage_unit.states:
        info = state.infos.get(path)
        if info is None:
            fixed[path] = literals[path]
        elif info.trainable:
            trained[path] = info
        else:
            fixed[path] = state.find(path)
    if not training:
        return BoundUnit(stage_unit, table.find(chunk, tuple(trained)), fixed)
    groups = weight_groups(stage_unit, {name: info.data_axes for name, info in trained.items()}, table.held_together)
    units = [
        (table.add(chunk, zero, names, functools.partial(_make_unit, names, zero, state, table.gathered_apart)), names)
        for names, zero in groups
    ]
    return BoundUnit(stage_unit, units, fixed)


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


def _make_unit(names: Sequence[str], zero: int, state: StepState, shared: Collection[str]) -> Unit:
    infos = [state.infos[name] for name in names]
    weights = [_weight(name, info, state, shared=name in shared) for name, info in zip(names, infos)]
    # A piece is owned as soon as one unit shards the parameter; another of its units then gathers it once a step.
    zero = max(zero, int(any(info.sharded for info in infos)))
    axes = infos[0].data_axes if infos else ()
    return Unit(weights, zero=zero, group=StateGroup.of(state.places.group_over(axes)))


def _weight(name: str, info: StateInfo, state: StepState, *, shared: bool) -> UnitWeight:
    owner = state.find(name)
    assert isinstance(owner, torch.nn.Parameter)
    shape = info.unsharded_shape(state.places.layout.mesh)
    return UnitWeight(name, owner, shape, compute=info.dtype, gradient=info.gradient_dtype, shared=shared)
