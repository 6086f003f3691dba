"""Units of an emitted program bound to their weights: what ``self.unit(Block(...))`` of a chunk's program does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from passes.stages import StageGraph
from passes.stages.build import StageUnit
from runtime import ops
from runtime.compat import mesh_of_thread, use_mesh
from runtime.compiling import as_compiled
from runtime.program import Block
from runtime.recompute import always_again, can_be_made_again, recomputed
from runtime.step.state import StateInfo, StepState
from runtime.units.group import DataGroup
from runtime.units.unit import Unit, UnitWeight
from runtime.weights import Weights


class BoundUnit:
    """One unit of a chunk: gathers its weights into trees that look like the model's, and runs a block with them.

    Args:
        names: full names of the unit's trained parameters, in the order of ``unit.weights``.
        fixed: the unit's other tensors, by full name.
    """

    def __init__(self, stage_unit: StageUnit, unit: Unit, names: Sequence[str], fixed: dict[str, torch.Tensor]) -> None:
        self.unit = unit
        self.names = tuple(names)
        self.zero = stage_unit.policy.zero
        count = 1 + max((root for root, _, _ in stage_unit.states), default=0)
        self.trees = [Weights() for _ in range(count)]
        self._slots: list[list[tuple[dict[str, Any], str]]] = [[] for _ in names]
        for root, path, full in stage_unit.states:
            self.trees[root].put(path, fixed.get(full))
            if full in fixed:
                continue
            parent, _, name = path.rpartition(".")
            node = self.trees[root].find(parent) if parent else self.trees[root]
            self._slots[names.index(full)].append((node._buffers, name))

    def run(self, block: Block, tensors: Sequence[torch.Tensor], forward: Callable[..., Any] | None = None) -> Any:
        """The block's outputs, with weights gathered for this run alone; ``forward`` runs it in another way."""
        with always_again():
            weights = self.unit.use()
        if not self.keeps_weights():
            can_be_made_again(weights, self.unit.use)
        for slots, weight in zip(self._slots, weights):
            for table, name in slots:
                table[name] = weight
        block.weights = self.trees[0] if len(self.trees) == 1 else tuple(self.trees)
        try:
            return (forward or block.forward)(*tensors)
        finally:
            for slots in self._slots:
                for table, name in slots:
                    table[name] = None

    def lend(self, tree: Weights) -> None:
        """Put the weights into a program's own tree, for what it computes outside of its units."""
        for path, weight in zip(self.names, self.unit.use()):
            tree.put(path, None)
            parent, _, name = path.rpartition(".")
            (tree.find(parent) if parent else tree)._buffers[name] = weight

    def keeps_weights(self) -> bool:
        """Whether autograd may keep the working weights: they are there all the time."""
        return self.unit.zero < 3


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
        microbatch, mesh = ops.current_microbatch(), mesh_of_thread()

        # What recomputes inside of a compiled block is in its graph; weights gathered for each use stay outside of it.
        inside = self.compiled_on is not None and bound.keeps_weights()
        forward = self._compiled(block, recompute if inside else "none", whole=inside or recompute in ("none", "full"))
        outside = "none" if inside else recompute

        def run(*tensors: torch.Tensor) -> Any:
            with ops.in_microbatch(microbatch), use_mesh(mesh):
                if outside == "none" and not bound.keeps_weights():
                    with bound.unit.saving():
                        return bound.run(block, tensors, forward)
                return bound.run(block, tensors, forward)

        return recomputed(run, outside, gathers_weights=outside == "regather") if torch.is_grad_enabled() else run

    def _compiled(self, block: Block, recompute: str, *, whole: bool) -> Callable[..., Any] | None:
        if self.compiled_on is None or not whole:
            return None
        return as_compiled(block, self.compiled_on, recompute=recompute)


def make_units(
    stage: StageGraph, state: StepState, literals: dict[str, torch.Tensor], known: dict[Any, Unit]
) -> tuple[list[BoundUnit], BoundUnit | None]:
    """The units of a chunk, and one for what its program uses outside of them (None if there is nothing).

    Args:
        known: units by what is in them, shared between programs of the same chunk; added to.
    """
    bound = [_bind(unit, state, literals, known, key=(stage.index, place)) for place, unit in enumerate(stage.units)]
    shared = _shared_unit(stage)
    return bound, (None if shared is None else _bind(shared, state, literals, known, key=(stage.index, "shared")))


def _shared_unit(stage: StageGraph) -> StageUnit | None:
    if not stage.shared:
        return None
    zero = max((unit.policy.zero for unit in stage.units), default=0)
    policy = type(stage.units[0].policy)("none", min(zero, 2))
    return StageUnit("shared", tuple((0, path, path) for path in stage.shared), policy)


def _bind(
    stage_unit: StageUnit,
    state: StepState,
    literals: dict[str, torch.Tensor],
    known: dict[Any, Unit],
    *,
    key: tuple[Any, ...],
) -> BoundUnit:
    trained, fixed = [], dict[str, torch.Tensor]()
    for _, _, path in stage_unit.states:
        info = state.infos.get(path)
        if info is None:
            fixed[path] = literals[path]
        elif info.trainable:
            trained.append((path, info))
        else:
            fixed[path] = state.find(path)
    names = list(dict.fromkeys(path for path, _ in trained))
    infos = dict(trained)
    identity = (*key, tuple(names), stage_unit.policy.zero)
    if identity not in known:
        group = DataGroup.of(state.places.data_group)
        weights = [_weight(name, infos[name], state) for name in names]
        # A piece is owned as soon as one unit shards the parameter; another of its units then gathers it once a step.
        sharded = any(info.sharded for info in infos.values())
        known[identity] = Unit(weights, zero=max(stage_unit.policy.zero, int(sharded)), group=group)
    return BoundUnit(stage_unit, known[identity], names, fixed)


def _weight(name: str, info: StateInfo, state: StepState) -> UnitWeight:
    owner = state.find(name)
    assert isinstance(owner, torch.nn.Parameter)
    return UnitWeight(name, owner, state.unsharded_shape(info), compute=info.dtype, gradient=info.gradient_dtype)
