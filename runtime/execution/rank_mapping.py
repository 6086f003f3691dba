"""Where the ranks of a step stand, and how parts of tensors become whole: on this rank, or on all ranks at once.

A step's mesh has a pipeline axis; programs run on the mesh without it. ``Places`` knows both: real ranks are one
process each, virtual ones are all ranks of one stage in this process, and every stage is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from passes.ir.types import MeshShape, Placement
from passes.pipeline_cut import BATCH_AXIS
from runtime.launch.groups import axes_in_rank_order, flattened_group, group_of, mesh_along, shared_group
from runtime.mesh.first_rank import from_first_rank
from runtime.mesh.layout import Layout, RankLayout, VirtualLayout, part_of
from runtime.state.owned import rectangle
from runtime.state.tensor_difference import largest_difference
from runtime.torch_compat.process_groups import functional_collectives as funcol
from runtime.zero.state_pieces import piece_ranks

PIPELINE = "pp"


@dataclass(frozen=True)
class Rectangle:
    """A part of a tensor: where it begins and how long it is in every dim; ``primary``: its first holder."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    primary: bool = True

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of this part of ``whole``."""
        part = whole
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes)):
            part = part.narrow(dim, offset, size)
        return part


#: Of the data ranks, those that this rank's pieces are whole with, and those that hold the same pieces (None: no other
#: rank does).
PieceGroups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]
#: The part that the rank at a coordinate of the program's mesh holds.
RectangleOf = Callable[[tuple[int, ...]], Rectangle]


class Places(Protocol):
    """Attributes:
    layout: of the programs' mesh (no pipeline axis).
    stage: this rank's pipeline rank; None if every stage is here.
    num_stages: pipeline ranks.
    pipeline_group: the ranks of one pipeline; None if there is one stage, or every stage is here.
    """

    layout: Layout
    device_mesh: DeviceMesh
    stage: int | None
    num_stages: int
    pipeline_group: dist.ProcessGroup | None

    def in_rank_order(self, axes: tuple[str, ...]) -> tuple[str, ...]: ...

    def group_over(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None: ...

    def piece_groups(self, data_axes: tuple[str, ...], zero_ranks: int) -> PieceGroups: ...

    def parameter_mesh(self, data_axes: tuple[str, ...], zero_ranks: int) -> DeviceMesh | None: ...

    def from_first(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]: ...

    def sum_over_batch_ranks(self, part: torch.Tensor) -> torch.Tensor: ...

    def join_batch(self, part: torch.Tensor, dim: int) -> torch.Tensor: ...

    def from_stage(self, tensor: torch.Tensor, stage: int) -> torch.Tensor: ...

    def stage_group(self, stages: tuple[int, ...]) -> dist.ProcessGroup | None: ...

    def cut(self, whole: torch.Tensor, rectangle: RectangleOf) -> torch.Tensor: ...

    def assemble(self, part: torch.Tensor | None, rectangle: RectangleOf, shape: Sequence[int], dtype: Any) -> Any: ...

    def rectangle(self, rectangle: RectangleOf) -> Rectangle: ...

    def own_shape(self, shape: tuple[int, ...], placement: Placement) -> tuple[int, ...]: ...

    def input_part(
        self,
        tensor: torch.Tensor,
        placement: Placement,
        mesh: MeshShape,
        at: Callable[[tuple[int, ...]], tuple[int, ...]],
    ) -> torch.Tensor: ...

    def to_device(self, part: torch.Tensor) -> torch.Tensor: ...


class RankPlaces:
    """One real rank.

    Args:
        device_mesh: over all axes of the step, by name.
        mesh: of the programs.
    """

    def __init__(self, device_mesh: DeviceMesh, mesh: MeshShape) -> None:
        self.device_mesh = device_mesh
        names = device_mesh.mesh_dim_names or ()
        inner = device_mesh if tuple(names) == mesh.names else mesh_along(device_mesh, mesh.names)
        self.layout: Layout = RankLayout(inner, mesh)
        self.num_stages = _size(device_mesh, PIPELINE)
        self.stage: int | None = device_mesh.get_local_rank(PIPELINE) if PIPELINE in names else 0
        self.pipeline_group = device_mesh.get_group(PIPELINE) if PIPELINE in names else None
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._parameter_meshes: dict[tuple[tuple[str, ...], int], DeviceMesh] = {}
        self._stage_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._everyone = None if device_mesh.mesh.numel() == 1 else flattened_group(device_mesh, "ranks")
        self._axes_in_rank_order = axes_in_rank_order(inner)

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """All ranks of the step; None for a rank alone."""
        return self._everyone

    def in_rank_order(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """``axes`` from the one that joins ranks furthest apart inwards, as their common group numbers its ranks."""
        return tuple(axis for axis in self._axes_in_rank_order if axis in axes)

    def group_over(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        """This rank's group over several axes of the programs together; None for one rank (all ranks must call it)."""
        return _group_over(axes, self.layout, self._groups)

    def piece_groups(self, data_axes: tuple[str, ...], zero_ranks: int) -> PieceGroups:
        """This rank's groups where ZeRO divides over ``zero_ranks`` of the data ranks (all of those must call it)."""
        return _piece_groups(self.group_over(data_axes), zero_ranks)

    def parameter_mesh(self, data_axes: tuple[str, ...], zero_ranks: int) -> DeviceMesh | None:
        """The mesh that parameters lie on: of the programs or, where they are cut into pieces over ``data_axes``, the
        other axes of several ranks and then one axis of all data ranks; where pieces are divided over ``zero_ranks`` of
        them, one of the ranks that hold the same pieces, and one of those that hold all pieces together.

        What cuts a tensor first is then further out, as DTensor reads a mesh.
        """
        if not data_axes:
            return self.layout.device_mesh
        key = data_axes, zero_ranks
        if key not in self._parameter_meshes:
            groups = self.piece_groups(data_axes, zero_ranks)
            self._parameter_meshes[key] = _parameter_mesh(self.layout, data_axes, groups)
        return self._parameter_meshes[key]

    def from_first(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Each of ``tensors`` as the first rank of the step has it."""
        return from_first_rank(tensors, self.device_mesh, self.layout.device)

    def sum_over_batch_ranks(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that have different samples."""
        return sum_over_axis(part, self.layout.device_mesh, BATCH_AXIS)

    def join_batch(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The samples of all data ranks one after another along ``dim``, on the CPU."""
        group = self.group_over((BATCH_AXIS,))
        if group is None:
            return part.detach().cpu()
        own = self.to_device(part.detach()).contiguous()
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own, group=group)
        return torch.cat([each.cpu() for each in parts], dim=dim)

    def from_stage(self, tensor: torch.Tensor, stage: int) -> torch.Tensor:
        """``tensor`` as pipeline rank ``stage`` has it, on all ranks of its pipeline."""
        if self.pipeline_group is not None and self.num_stages > 1:
            tensor = tensor.contiguous()
            dist.broadcast(tensor, group=self.pipeline_group, group_src=stage)
        return tensor

    def stage_group(self, stages: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The ranks of this rank's pipeline at ``stages``; None if this rank is at none of them."""
        if len(stages) == self.num_stages:
            return self.pipeline_group
        if self.stage not in stages:
            return None
        if stages not in self._stage_groups:
            assert self.pipeline_group is not None
            pipeline = dist.get_process_group_ranks(self.pipeline_group)
            self._stage_groups[stages] = group_of(sorted(pipeline[stage] for stage in stages))
        return self._stage_groups[stages]

    def rectangle(self, rectangle: RectangleOf) -> Rectangle:
        """The rectangle of this rank."""
        return rectangle(self.layout.coordinate)

    def own_shape(self, shape: tuple[int, ...], placement: Placement) -> tuple[int, ...]:
        """Shape of this rank's part of a tensor of ``shape``."""
        return part_shape(shape, placement, self.layout.mesh, self.layout.coordinate)

    def cut(self, whole: torch.Tensor, rectangle: RectangleOf) -> torch.Tensor:
        """This rank's part of ``whole``, a copy on its device."""
        part = self.rectangle(rectangle).of(whole)
        if part.is_meta:
            return torch.empty(part.shape, dtype=part.dtype, device="meta")
        return part.to(self.layout.device, copy=True, memory_format=torch.contiguous_format)

    def assemble(
        self, part: torch.Tensor | None, rectangle: RectangleOf, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """The whole tensor on every rank, from the parts of those that have one (all ranks must call this)."""
        narrow = dtype == torch.bool
        whole = torch.zeros(tuple(shape), dtype=torch.uint8 if narrow else dtype, device=self.layout.device)
        own_rectangle = self.rectangle(rectangle)
        if part is not None and own_rectangle.primary:
            own_rectangle.of(whole).copy_(part.detach())
        if self._everyone is not None:
            whole = _waited(funcol.all_reduce(whole, "sum", self._everyone))
        return whole.bool() if narrow else whole

    def input_part(
        self,
        tensor: torch.Tensor,
        placement: Placement,
        mesh: MeshShape,
        at: Callable[[tuple[int, ...]], tuple[int, ...]],
    ) -> torch.Tensor:
        """This rank's part of an input on a ``mesh`` that counts micro-batches, a view; ``at`` is its place there."""
        return part_of(tensor, placement, mesh, at(self.layout.coordinate))

    def to_device(self, part: torch.Tensor) -> torch.Tensor:
        """Move a part of an input to the device on which programs run."""
        return part.to(self.layout.device).contiguous()


class VirtualPlaces:
    """Every rank of one stage as a ``LocalTensor``; all stages are here, one after the other."""

    def __init__(self, layout: VirtualLayout, *, num_stages: int = 1) -> None:
        self.layout: Layout = layout
        self._virtual = layout
        self.device_mesh = layout.device_mesh
        self.num_stages = num_stages
        self.stage: int | None = None
        self.pipeline_group: dist.ProcessGroup | None = None
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}

    def in_rank_order(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return axes  # virtual ranks are numbered in the order of the mesh

    def group_over(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        return _group_over(axes, self.layout, self._groups)

    def piece_groups(self, data_axes: tuple[str, ...], zero_ranks: int) -> PieceGroups:
        return _piece_groups(self.group_over(data_axes), zero_ranks)

    def parameter_mesh(self, data_axes: tuple[str, ...], zero_ranks: int) -> DeviceMesh | None:
        return None

    def from_first(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        return iter(tensors)

    def rectangle(self, rectangle: RectangleOf) -> Rectangle:
        """The rectangle of the first rank."""
        return rectangle(self.layout.coordinate)

    def own_shape(self, shape: tuple[int, ...], placement: Placement) -> tuple[int, ...]:
        """Shape of the parts of all ranks: a size that differs between them is a number of its own on each."""
        from runtime.torch_compat.local_tensors import size_on_ranks

        mesh = self.layout.mesh
        coordinates = {rank: self._virtual.coordinate_of(rank) for rank in range(mesh.num_devices)}
        shapes = {rank: part_shape(shape, placement, mesh, where) for rank, where in coordinates.items()}
        return tuple(size_on_ranks({rank: own[dim] for rank, own in shapes.items()}) for dim in range(len(shape)))

    def cut(self, whole: torch.Tensor, rectangle: RectangleOf) -> torch.Tensor:
        return self._each(whole, lambda coordinate, tensor: rectangle(coordinate).of(tensor))

    def input_part(
        self,
        tensor: torch.Tensor,
        placement: Placement,
        mesh: MeshShape,
        at: Callable[[tuple[int, ...]], tuple[int, ...]],
    ) -> torch.Tensor:
        return self._each(tensor, lambda coordinate, whole: part_of(whole, placement, mesh, at(coordinate)))

    def to_device(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def sum_over_batch_ranks(self, part: torch.Tensor) -> torch.Tensor:
        return sum_over_axis(part, self.layout.device_mesh, BATCH_AXIS)

    def join_batch(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        from runtime.torch_compat.local_tensors import parts_of_ranks

        ranks = range(self.layout.mesh.num_devices)
        axis = self.layout.mesh.names.index(BATCH_AXIS)
        by_coordinate = {self._virtual.coordinate_of(rank)[axis]: rank for rank in ranks}
        with self.plain():
            parts = parts_of_ranks(part, ranks)
            return torch.cat([parts[by_coordinate[place]] for place in sorted(by_coordinate)], dim=dim)

    def from_stage(self, tensor: torch.Tensor, stage: int) -> torch.Tensor:
        return tensor

    def stage_group(self, stages: tuple[int, ...]) -> dist.ProcessGroup | None:
        return None

    def _each(self, whole: torch.Tensor, part: Callable[[tuple[int, ...], torch.Tensor], torch.Tensor]) -> torch.Tensor:
        from runtime.torch_compat.local_tensors import LocalTensor, parts_of_ranks

        with self.plain():
            ranks = range(self.layout.mesh.num_devices)
            wholes = parts_of_ranks(whole, ranks)
            parts = {rank: part(self._virtual.coordinate_of(rank), wholes[rank]).clone().contiguous() for rank in ranks}
        return LocalTensor(parts)

    def assemble(
        self, part: torch.Tensor | None, rectangle: RectangleOf, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        from runtime.torch_compat.local_tensors import parts_of_ranks

        with self.plain():
            whole = torch.zeros(tuple(shape), dtype=dtype)
            if part is None:
                return whole
            for rank, local in parts_of_ranks(part).items():
                place = rectangle(self._virtual.coordinate_of(rank))
                if place.primary:  # Added up, as real ranks do: a part that two of them count is then wrong here too.
                    place.of(whole).add_(local.detach())
        return whole

    def disagreement(self, local: torch.Tensor, rectangle: RectangleOf) -> float:
        """Largest difference between ranks that hold the same rectangle."""
        from runtime.torch_compat.local_tensors import parts_of_ranks

        first: dict[tuple[int, ...], torch.Tensor] = {}
        worst = 0.0
        with self.plain():
            for rank, part in parts_of_ranks(local).items():
                place = rectangle(self._virtual.coordinate_of(rank))
                reference = first.setdefault((*place.offsets, *place.sizes), part)
                if reference is not part:
                    worst = max(worst, largest_difference(part.detach(), reference.detach()))
        return worst

    def plain(self) -> AbstractContextManager[Any]:
        return self.layout.plain()


def part_shape(
    shape: tuple[int, ...], placement: Placement, mesh: MeshShape, coordinate: tuple[int, ...]
) -> tuple[int, ...]:
    """Shape of the part that the rank at ``coordinate`` holds."""
    return rectangle(shape, placement, mesh, coordinate)[1]


def sum_over_axis(part: torch.Tensor, device_mesh: DeviceMesh, axis: str) -> torch.Tensor:
    """The sum of ``part`` over the ranks of a mesh axis."""
    if _size(device_mesh, axis) == 1:
        return part
    return _waited(funcol.all_reduce(part.contiguous(), "sum", device_mesh.get_group(axis)))


def _group_over(
    axes: tuple[str, ...], layout: Layout, groups: dict[tuple[str, ...], dist.ProcessGroup]
) -> dist.ProcessGroup | None:
    axes = tuple(axis for axis in axes if layout.mesh.size(axis) > 1)
    if not axes:
        return None
    if axes not in groups:
        mesh = layout.device_mesh
        groups[axes] = (
            mesh.get_group(axes[0]) if len(axes) == 1 else flattened_group(mesh_along(mesh, axes), "_".join(axes))
        )
    return groups[axes]


def _piece_groups(data: dist.ProcessGroup | None, zero_ranks: int) -> PieceGroups:
    """The groups of this rank among the ``data`` ranks, each made by its members alone."""
    if data is None:
        return None, None
    size = piece_ranks(data.size(), zero_ranks)
    if size == data.size():
        return data, None
    ranks, (group, place) = dist.get_process_group_ranks(data), divmod(data.rank(), size)
    together = shared_group("pieces", sorted(ranks[group * size : (group + 1) * size]))
    return together, shared_group("replicas", sorted(ranks[place::size]))


def piece_axes(mesh: MeshShape, data_axes: Sequence[str]) -> tuple[str, ...]:
    """The axes of ``Places.parameter_mesh`` besides that of the data ranks."""
    axes = tuple(axis for axis in mesh.names if axis not in data_axes and mesh.size(axis) > 1)
    # A mesh needs at least one axis.
    return axes or (mesh.names[:1] if all(mesh.size(axis) == 1 for axis in data_axes) else ())


def _parameter_mesh(layout: Layout, data_axes: tuple[str, ...], pieces: PieceGroups) -> DeviceMesh:
    """The mesh of ``Places.parameter_mesh``, on the groups that there are."""
    mesh, inner = layout.mesh, layout.device_mesh
    axes = piece_axes(mesh, data_axes)
    outer = [mesh.names.index(axis) for axis in axes]
    cut = [mesh.names.index(axis) for axis in data_axes]
    rest = [*(place for place in range(len(mesh.names)) if place not in (*outer, *cut)), *cut]
    groups, names, sizes = [inner.get_group(axis) for axis in axes], list(axes), [mesh.size(axis) for axis in axes]
    together, replicas = pieces
    for group, name in ((replicas, "replicas"), (together, "data")):
        if group is not None:
            groups, names, sizes = [*groups, group], [*names, name], [*sizes, group.size()]
    ranks = inner.mesh.permute(*outer, *rest).reshape(sizes)
    return DeviceMesh.from_group(groups, inner.device_type, mesh=ranks.contiguous(), mesh_dim_names=tuple(names))


def _size(device_mesh: DeviceMesh, axis: str) -> int:
    names = device_mesh.mesh_dim_names or ()
    return device_mesh.size(names.index(axis)) if axis in names else 1


def _waited(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.wait() if isinstance(tensor, funcol.AsyncCollectiveTensor) else tensor


def local_axes(mesh: MeshShape) -> tuple[str, ...]:
    """The axes on which local inputs are cut already: ranks of all others pass the same samples."""
    return tuple(name for name in mesh.names if name == BATCH_AXIS)
