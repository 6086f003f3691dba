"""Units of an emitted program bound to their weights: what ``self.unit(Block(...))`` of a chunk's program does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from passes.pipeline_cut import StageGraph
from passes.pipeline_cut.step_programs import StageUnit
from passes.plan.step_plan import ON_HOST
from passes.torch_compat.module_tables import buffers_of
from runtime import ops
from runtime.execution.state_info import StateInfo
from runtime.execution.step_state import StepState
from runtime.execution.unit_table import GATHERED_PER_USE, UnitTable, weight_groups
from runtime.program_tools.compiling import as_compiled, can_be_one_graph
from runtime.program_tools.offloaded_activations import stay_on_device
from runtime.program_tools.recompute import always_again, recomputed
from runtime.programs.program import Block
from runtime.state.weight_tree import WeightTree
from runtime.torch_compat.dispatcher import are_operators_observed
from runtime.torch_compat.spmd_internals import mesh_of_thread, use_mesh
from runtime.zero.group import StateGroup
from runtime.zero.unit import Unit, UnitWeight

#: A place of a tensor in a tree: the table of attributes and the name in it.
_Slot = tuple[dict[str, Any], str]
_NOTHING: Mapping[int, torch.Tensor] = MappingProxyType({})


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
        self.keeps_weights = all(unit.zero < GATHERED_PER_USE for unit in self.units)
        self._names = tuple(name for _, names in units for name in names)
        self._fixed = tuple(fixed.values())
        self.trees = [WeightTree() for _ in range(stage_unit.num_roots)]
        slots: dict[str, list[_Slot]] = {}
        for root, path, full in stage_unit.states:
            self.trees[root].put(path, fixed.get(full))
            parent, _, name = path.rpartition(".")
            node = self.trees[root].find(parent) if parent else self.trees[root]
            slots.setdefault(full, []).append((node.__dict__, name))
        self._slots = [slots.get(name, []) for name in self._names]
        self._fixed_slots = [slots.get(name, []) for name in fixed]
        for tree in self.trees:
            tree.look_up_at_once()
        #: Whether what a block uses are the owners themselves, always the same.
        self._are_owners = all(unit.uses_owners for unit in self.units)
        self._is_filled = False

    def run(
        self,
        block: Block,
        *tensors: torch.Tensor,
        forward: Callable[..., Any] | None = None,
        before: Mapping[int, torch.Tensor] = _NOTHING,
    ) -> Any:
        """The block's outputs, with weights gathered for this run alone.

        Args:
            forward: runs the block in another way.
            before: what is read in the place of buffers, by their ids.
        """
        if not (self._are_owners and self._is_filled):
            self._fill(self._slots, self._weights())
            self._is_filled = True
        if before:
            self._fill(self._fixed_slots, [before.get(id(tensor), tensor) for tensor in self._fixed])
        stay_on_device(self._tensors)
        block.weights = self.trees[0] if len(self.trees) == 1 else tuple(self.trees)
        try:
            return (forward or block.forward)(*tensors)
        finally:
            if not self._are_owners:
                self._fill(self._slots, [None] * len(self._slots))
            if before:
                self._fill(self._fixed_slots, self._fixed)

    @staticmethod
    def _fill(all_slots: Sequence[Sequence[_Slot]], tensors: Sequence[torch.Tensor | None]) -> None:
        for slots, tensor in zip(all_slots, tensors):
            for table, name in slots:
                table[name] = tensor

    def _tensors(self) -> list[torch.Tensor | None]:
        """What the trees hold: weights as they are used, and the unit's other tensors."""
        return [table[name] for slots in (*self._fixed_slots, *self._slots) for table, name in slots]

    def lend(self, tree: WeightTree) -> None:
        """Put the weights into a program's own tree for operators outside of its units."""
        for path, weight in zip(self._names, self._weights()):
            tree.put(path, None)
            parent, _, name = path.rpartition(".")
            buffers_of(tree.find(parent) if parent else tree)[name] = weight

    def _weights(self) -> list[torch.Tensor]:
        with always_again():
            return [weight for unit in self.units for weight in unit.use()]


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
        inside = self._compiles and bound.keeps_weights and can_be_one_graph(block)
        graphed = recompute if inside and recompute != ON_HOST else "none"
        forward = self._compiled(block, graphed, whole=inside or recompute in ("none", "full", ON_HOST))
        outside = "none" if inside and recompute != ON_HOST else recompute

        before = ops.values_before()
        if not torch.is_grad_enabled() or (outside == "none" and bound.keeps_weights):  # Runs once, here and now.
            return functools.partial(bound.run, block, forward=forward, before=before)
        microbatch, mesh, device = ops.current_microbatch(), mesh_of_thread(), torch.get_default_device()

        def run(*tensors: torch.Tensor) -> Any:
            on_device = contextlib.nullcontext() if device.type == "cpu" else device
            with ops.in_microbatch(microbatch), use_mesh(mesh), on_device:
                return bound.run(block, *tensors, forward=forward, before=before)

        return recomputed(run, outside, gathers_weights=not bound.keeps_weights)

    @property
    def _compiles(self) -> bool:
        """Whether blocks are compiled: dynamo of torch 2.13 refuses whole graphs while a dispatch mode is active."""
        return self.compiled_on is not None and not are_operators_observed()

    def _compiled(self, block: Block, recompute: str, *, whole: bool) -> Callable[..., Any] | None:
        if not self._compiles or not whole:
            return None
        assert self.compiled_on is not None
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
        for name in (name for name in trained if table.lacks(chunk, name)):  # nothing that a step does with weights
            table.add(chunk, 0, (name,), functools.partial(_make_unit, (name,), 0, state, ()))
        return BoundUnit(stage_unit, table.find(chunk, tuple(trained)), fixed)
    groups = weight_groups(stage_unit, {name: info.data_axes for name, info in trained.items()}, table.held_together)
    units = [
        (table.add(chunk, zero, names, functools.partial(_make_unit, names, zero, state, table.gathered_apart)), names)
        for names, zero in groups
    ]
    return BoundUnit(stage_unit, units, fixed)


def _make_unit(names: Sequence[str], zero: int, state: StepState, shared: Collection[str]) -> Unit:
    infos = [state.infos[name] for name in names]
    weights = [_weight(name, info, state, shared=name in shared) for name, info in zip(names, infos)]
    # A piece is owned as soon as one unit shards the parameter; another of its units then gathers it once a step.
    zero = max(zero, int(any(info.sharded for info in infos)))
    axes, zero_ranks = (infos[0].data_axes, infos[0].zero_ranks) if infos else ((), 0)
    groups = state.places.piece_groups(axes, zero_ranks if zero else 0)
    return Unit(weights, zero=zero, group=StateGroup.of(*groups), splits_backward=state.splits_backward)


def _weight(name: str, info: StateInfo, state: StepState, *, shared: bool) -> UnitWeight:
    owner = state.find(name)
    assert isinstance(owner, torch.nn.Parameter)
    mesh = state.places.layout.mesh
    return UnitWeight(
        name,
        owner,
        shape=state.places.own_shape(info.shape, info.placement),
        largest=info.unsharded_shape(mesh),
        piece_dim=info.piece_dim(mesh),
        compute=info.dtype,
        gradient=info.gradient_dtype,
        shared=shared,
    )
