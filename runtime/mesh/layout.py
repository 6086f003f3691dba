"""Whole tensors to parts and back: for the rank of this process, or for every rank at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from passes.ir.types import MeshShape, P, Placement, part_of_dim, shard_dim
from passes.torch_compat.quick_pytrees import quick_pytrees
from runtime.data.host_copies import HostCopies, host_copies
from runtime.mesh.first_rank import from_first_rank
from runtime.mesh.joint_axes import remember
from runtime.mesh.virtual import virtual_mesh
from runtime.torch_compat.allocator import grow_segments
from runtime.torch_compat.process_groups import all_gather_along
from runtime.torch_compat.process_groups import functional_collectives as funcol

#: The mesh axis that cuts the batch.
DATA = "dp"


class Layout(Protocol):
    """Where the parts of tensors live.

    ``split`` gives this rank's part of a whole tensor in a placement; ``join`` is its inverse, on all ranks. Both
    give new tensors without history.
    """

    mesh: MeshShape
    device_mesh: DeviceMesh
    device: torch.device
    #: This rank's place on every axis (of virtual ranks: the first one's).
    coordinate: tuple[int, ...]
    #: Bring inputs to ``device``; None where they are there.
    copies: HostCopies | None

    def from_first(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield each of ``tensors`` as the first rank has it."""

    def split(self, whole: torch.Tensor, placement: Placement) -> torch.Tensor: ...

    def join(self, local: torch.Tensor, placement: Placement) -> torch.Tensor: ...

    def marks(self, is_marked: Callable[[tuple[int, ...]], bool]) -> torch.Tensor | None:
        """Of virtual ranks: 1 on those at whose coordinate ``is_marked`` holds, else 0. None for one real rank."""

    def plain(self) -> AbstractContextManager[Any]:
        """A context in which tensors are ordinary ones, for work that is not a rank's part of a step."""


def part_of(whole: torch.Tensor, placement: Placement, mesh: MeshShape, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The part that the rank at ``coordinate`` holds; a view of ``whole``."""
    part = whole
    for size, spmd_type, index in zip(mesh.sizes, placement, coordinate):
        dim = shard_dim(spmd_type)
        if dim is not None:
            part = part.narrow(dim, *part_of_dim(part.shape[dim], size, index))
    return part


class RankLayout:
    """The part of one real rank, on the device of its mesh."""

    def __init__(self, device_mesh: DeviceMesh, mesh: MeshShape) -> None:
        self.device_mesh = device_mesh
        remember(device_mesh)
        self.mesh = mesh
        self.coordinate = tuple(device_mesh.get_coordinate() or ())
        self.device = torch.device(device_mesh.device_type)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
            grow_segments()
        self.copies = host_copies(self.device)

    def from_first(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        return from_first_rank(tensors, self.device_mesh, self.device)

    def split(self, whole: torch.Tensor, placement: Placement) -> torch.Tensor:
        part = part_of(whole, placement, self.mesh, self.coordinate)
        if part.is_meta:
            return torch.empty(part.shape, dtype=part.dtype, device="meta")
        # A copy: the part must not keep the whole tensor alive.
        return part.to(self.device, copy=True, memory_format=torch.contiguous_format)

    def join(self, local: torch.Tensor, placement: Placement) -> torch.Tensor:
        whole = local.detach()
        for name, size, spmd_type in reversed(list(zip(self.mesh.names, self.mesh.sizes, placement))):
            dim = shard_dim(spmd_type)
            if size == 1 or (dim is None and spmd_type != P):
                continue
            group = self.device_mesh.get_group(name)
            if dim is None:
                whole = funcol.all_reduce(whole.contiguous(), "sum", group)
            else:
                whole = all_gather_along(whole.contiguous(), dim, group)
            whole = whole.wait() if isinstance(whole, funcol.AsyncCollectiveTensor) else whole
        return whole.clone() if whole.data_ptr() == local.data_ptr() else whole

    def marks(self, is_marked: Callable[[tuple[int, ...]], bool]) -> torch.Tensor | None:
        return None

    def plain(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()


class VirtualLayout:
    """The parts of all ranks in one process, as a ``LocalTensor``."""

    def __init__(self, device_mesh: DeviceMesh, mesh: MeshShape) -> None:
        self.device_mesh = device_mesh
        self.mesh = mesh
        self.device = torch.device("cpu")
        self.coordinate = (0,) * len(mesh.names)
        self.copies: HostCopies | None = None

    def from_first(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        return iter(tensors)

    def coordinate_of(self, rank: int) -> tuple[int, ...]:
        coordinate = []
        for size in reversed(self.mesh.sizes):
            rank, index = divmod(rank, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))

    def split(self, whole: torch.Tensor, placement: Placement) -> torch.Tensor:
        from runtime.torch_compat.local_tensors import LocalTensor, parts_of_ranks

        with self.plain():
            ranks = range(self.mesh.num_devices)
            # A tensor made among the virtual ranks is one per rank already.
            wholes = parts_of_ranks(whole, ranks)
            parts = {
                rank: part_of(wholes[rank], placement, self.mesh, self.coordinate_of(rank)).clone().contiguous()
                for rank in ranks
            }
        return LocalTensor(parts)

    def join(self, local: torch.Tensor, placement: Placement) -> torch.Tensor:
        from runtime.torch_compat.local_tensors import parts_of_ranks

        with self.plain():
            return self._assemble(parts_of_ranks(local), placement, ()).clone()

    def marks(self, is_marked: Callable[[tuple[int, ...]], bool]) -> torch.Tensor | None:
        from runtime.torch_compat.local_tensors import LocalTensor

        marked = [is_marked(self.coordinate_of(rank)) for rank in range(self.mesh.num_devices)]
        with self.plain():
            parts = {rank: torch.tensor(float(mark), dtype=torch.float64) for rank, mark in enumerate(marked)}
        return LocalTensor(parts)

    def plain(self) -> AbstractContextManager[Any]:
        from runtime.torch_compat.local_tensors import maybe_disable_local_tensor_mode

        return maybe_disable_local_tensor_mode()

    def _assemble(self, parts: dict[int, torch.Tensor], placement: Placement, coordinate: tuple[int, ...]) -> Any:
        axis = len(coordinate)
        if axis == len(self.mesh.sizes):
            return parts[self._rank(coordinate)].detach()
        spmd_type = placement[axis]
        dim = shard_dim(spmd_type)
        count = self.mesh.sizes[axis] if dim is not None or spmd_type == P else 1
        inner = [self._assemble(parts, placement, (*coordinate, index)) for index in range(count)]
        if dim is not None:
            return torch.cat(inner, dim)
        return torch.stack(inner).sum(0) if spmd_type == P else inner[0]

    def _rank(self, coordinate: tuple[int, ...]) -> int:
        rank = 0
        for size, index in zip(self.mesh.sizes, coordinate):
            rank = rank * size + index
        return rank

    def disagreement(self, local: torch.Tensor, placement: Placement) -> float:
        """Largest difference between ranks that should hold the same values."""
        from runtime.torch_compat.local_tensors import parts_of_ranks

        parts = parts_of_ranks(local)
        worst = 0.0
        for rank, part in parts.items():
            coordinate = self.coordinate_of(rank)
            first = tuple(
                index if shard_dim(spmd_type) is not None or spmd_type == P else 0
                for index, spmd_type in zip(coordinate, placement)
            )
            difference = (part.detach() - parts[self._rank(first)].detach()).abs()
            worst = max(worst, float(difference.max()) if difference.numel() else 0.0)
        return worst


@contextlib.contextmanager
def virtual_ranks(mesh: MeshShape) -> Iterator[VirtualLayout]:
    """Every rank of ``mesh`` in this process: inside the block, tensors of a parallel module are ``LocalTensor``."""
    from runtime.torch_compat.local_tensors import LocalTensorMode, shapes_looked_up

    with virtual_mesh(mesh) as device_mesh, LocalTensorMode(mesh.num_devices), shapes_looked_up(), quick_pytrees():
        yield VirtualLayout(device_mesh, mesh)
