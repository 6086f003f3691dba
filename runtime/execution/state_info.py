"""One tensor of the model: its names, dtypes and placement, and who reduces its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from passes.ir.types import I, MeshShape, Placement, R, local_shape, uneven_dims
from passes.pipeline_cut import Deferral, StepPrograms
from passes.plan import Plan
from runtime.execution.rank_mapping import Rectangle, RectangleOf, piece_axes
from runtime.execution.unit_table import sharded_paths, stages_of
from runtime.state.owned import is_first_holder, rectangle, torch_placements
from runtime.zero.precision import Dtypes, Precision, precision_of
from runtime.zero.state_pieces import piece_dim, piece_of, piece_ranks


@dataclass(frozen=True)
class StateInfo:
    """One tensor of the model as a step holds it.

    Attributes:
        names: its names in the model, the one that programs use first.
        dtype, owner_dtype, gradient_dtype: that it computes in, that this rank keeps, that gradients are added up in.
        placement: on the programs' mesh; R on ``data_axes``.
        data_axes: over which its gradient is summed outside of the programs, in the order of their ranks.
        used: whether any program uses it.
        sharded: whether each data rank owns a piece of it only (ZeRO 1 to 3; without dims there are no pieces).
        zero_ranks: over how many neighbours of the data ranks pieces are divided; 0: over all.
        stages: pipeline ranks that have it, in order.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner_dtype: torch.dtype
    gradient_dtype: torch.dtype
    placement: Placement
    data_axes: tuple[str, ...]
    is_parameter: bool
    trainable: bool
    persistent: bool
    sharded: bool
    used: bool
    stages: tuple[int, ...]
    zero_ranks: int = 0

    def unsharded_shape(self, mesh: MeshShape) -> tuple[int, ...]:
        """Its shape as programs use it on the first rank."""
        return local_shape(self.shape, self.placement, mesh)

    def piece_dim(self, mesh: MeshShape) -> int:
        """The dim that its pieces are cut in: the same on all ranks, though they may hold parts of unequal length."""
        uneven = uneven_dims(self.shape, self.placement, mesh)
        return piece_dim(self.unsharded_shape(mesh), self.piece_ranks(mesh), uneven)

    def rectangle(self, mesh: MeshShape) -> RectangleOf:
        """Which part of it the rank at a coordinate owns."""

        def part(coordinate: tuple[int, ...]) -> Rectangle:
            offsets, sizes = rectangle(self.shape, self.placement, mesh, coordinate)
            if not self.sharded:
                return Rectangle(offsets, sizes, is_first_holder(self.placement, coordinate))
            group, rank = divmod(self._data_rank(mesh, coordinate), self.piece_ranks(mesh))
            dim, offset, length = piece_of(sizes, self.piece_ranks(mesh), rank, self.piece_dim(mesh))
            moved = tuple(o + offset if d == dim else o for d, o in enumerate(offsets))
            cut = tuple(length if d == dim else size for d, size in enumerate(sizes))
            others = tuple(0 if axis in self.data_axes else index for axis, index in zip(mesh.names, coordinate))
            return Rectangle(moved, cut, not group and is_first_holder(self.placement, others))

        return part

    def is_primary(self, mesh: MeshShape) -> Callable[[tuple[int, ...]], bool]:
        """Whether the rank at a coordinate is the first that owns its part."""
        part = self.rectangle(mesh)
        return lambda coordinate: part(coordinate).primary

    def torch_placements(
        self, mesh: MeshShape, data_axes: tuple[str, ...], zero_ranks: int
    ) -> tuple[TorchPlacement, ...]:
        """On the axes of ``Places.parameter_mesh(data_axes, zero_ranks)``."""
        if not data_axes:
            return torch_placements(self.placement)
        types = [self.placement[mesh.names.index(axis)] for axis in piece_axes(mesh, data_axes)]
        ranks = _product(mesh, data_axes)
        size = piece_ranks(ranks, zero_ranks)
        uneven = uneven_dims(self.shape, self.placement, mesh)
        dim = piece_dim(self.unsharded_shape(mesh), size, uneven)
        replicas = (Replicate(),) if size < ranks else ()
        return (*torch_placements(types), *replicas, Shard(dim) if self.sharded and self.shape else Replicate())

    def piece_ranks(self, mesh: MeshShape) -> int:
        """How many ranks its pieces are divided over, if it is."""
        return piece_ranks(self.data_size(mesh), self.zero_ranks)

    def data_size(self, mesh: MeshShape) -> int:
        """How many ranks its gradient is summed over."""
        return _product(mesh, self.data_axes)

    def _data_rank(self, mesh: MeshShape, coordinate: tuple[int, ...]) -> int:
        """The number of the rank at a coordinate among those that the pieces are divided over."""
        rank = 0
        for axis in self.data_axes:
            rank = rank * mesh.size(axis) + coordinate[mesh.names.index(axis)]
        return rank


def unplanned(names: tuple[str, ...], tensor: torch.Tensor, mesh: MeshShape, *, persistent: bool) -> StateInfo:
    """The info of a tensor before there is a plan: whole on every rank."""
    trains = isinstance(tensor, nn.Parameter) and tensor.requires_grad
    return StateInfo(
        names=names,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        owner_dtype=tensor.dtype,
        gradient_dtype=tensor.dtype,
        placement=((I if trains else R),) * len(mesh.names),
        data_axes=(),
        is_parameter=isinstance(tensor, nn.Parameter),
        trainable=trains,
        persistent=persistent,
        sharded=False,
        used=False,
        stages=(0,),
    )


@dataclass(frozen=True)
class Placing:
    """What decides how tensors are held.

    Attributes:
        deferral: the axes on which gradients are reduced outside of programs, by path.
        stages: pipeline ranks whose programs use a tensor, by path.
        pieces: paths of what ZeRO cuts over data ranks.
        casts: whether parameters compute in the plan's dtypes rather than in their own.
        beside: pipeline ranks that have a tensor which only other programs use, by path.
    """

    plan: Plan
    deferral: Deferral
    precision: Precision
    stages: Mapping[str, tuple[int, ...]]
    pieces: frozenset[str]
    casts: bool
    beside: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @staticmethod
    def on_mesh(plan: Plan, deferral: Deferral) -> Placing:
        """Of a plan on a given mesh: one stage, nothing in pieces, all in its own dtype."""
        return Placing(plan, deferral, precision_of(plan), dict.fromkeys(plan.states, (0,)), frozenset(), casts=False)

    @staticmethod
    def of_step(
        plan: Plan, deferral: Deferral, programs: StepPrograms, beside: Mapping[str, tuple[int, ...]]
    ) -> Placing:
        """Of a plan of a whole step; ``beside``: pipeline ranks of weights that its step does not use."""
        stages, pieces = stages_of(plan, programs), sharded_paths(programs)
        return Placing(plan, deferral, precision_of(plan), stages, pieces, casts=True, beside=beside)

    def placed(self, info: StateInfo) -> StateInfo:
        """``info`` under the plan."""
        mesh = self.plan.mesh
        path = next((name for name in info.names if name in self.plan.states), info.names[0])
        planned = self.plan.states.get(path)
        placement = tuple(planned.placement) if planned is not None else info.placement
        dtypes = self._dtypes(info, None if planned is None else planned.dtype)
        deferred = self.deferral.get(path, ())
        data_axes = tuple(axis for axis in deferred if mesh.size(axis) > 1) if info.trainable else ()
        return dataclasses.replace(
            info,
            names=(path, *(name for name in info.names if name != path)),
            dtype=dtypes.compute,
            owner_dtype=dtypes.master if info.trainable else dtypes.compute,
            gradient_dtype=dtypes.gradient,
            placement=tuple(R if axis in deferred else where for axis, where in zip(mesh.names, placement)),
            data_axes=data_axes,
            sharded=path in self.pieces and bool(data_axes) and bool(info.shape),
            zero_ranks=self.plan.step.zero_ranks_along(data_axes) if data_axes else 0,
            used=path in self.stages,
            # What no program uses is kept by the first stage, so that it is not lost from checkpoints.
            stages=self.stages.get(path) or self.beside.get(path, (0,)),
        )

    def _dtypes(self, info: StateInfo, planned: str | None) -> Dtypes:
        if not info.is_parameter:
            return Dtypes(info.dtype, info.dtype, info.dtype)
        if self.casts and planned is not None and info.dtype.is_floating_point:
            # A plan that computes in another dtype than the model's: the model's own is the master.
            compute = getattr(torch, planned)
            if compute != info.dtype:
                return Dtypes(compute, info.dtype, self.precision.of(compute).gradient)
        return self.precision.of(info.dtype)


def _product(mesh: MeshShape, axes: Sequence[str]) -> int:
    product = 1
    for axis in axes:
        product *= mesh.size(axis)
    return product
