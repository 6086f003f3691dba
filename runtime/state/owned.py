"""What a rank owns of a model: for every tensor the rectangle that it holds, and whether it is the one to write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from passes.ir.types import MeshShape, Placement, SpmdType, part_of_dim, shard_dim


@dataclass(frozen=True)
class Owned:
    """This rank's part of one tensor of the model.

    Attributes:
        name, aliases: in the original model; ``name`` is the first of them.
        tensor: what the rank holds: the rectangle from ``offsets`` to ``offsets + tensor.shape`` of the whole tensor.
        shape: of the whole tensor.
        kind, trainable, persistent: a parameter or a buffer, whether it is trained, whether it is in the state dict.
        primary: of the ranks that hold this rectangle, this one writes it.
        virtual_primary: of virtual ranks: 1 on those for which ``primary`` holds, else 0.
        state_on_host: whether its optimizer state is to be in the host's memory.
        device_mesh, placements: the same as DTensor says it; no mesh where one tensor is that of many virtual ranks.
    """

    name: str
    aliases: tuple[str, ...]
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    kind: Literal["parameter", "buffer"]
    trainable: bool
    persistent: bool
    primary: bool
    virtual_primary: torch.Tensor | None = None
    device_mesh: DeviceMesh | None = None
    placements: Sequence[TorchPlacement] = ()
    state_on_host: bool = False

    @property
    def counts(self) -> bool | torch.Tensor:
        """Whether (of virtual ranks: how often) this rank's part is counted in what is summed over all ranks."""
        return self.primary if self.virtual_primary is None else self.virtual_primary


def rectangle(
    shape: tuple[int, ...], placement: Placement, mesh: MeshShape, coordinate: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of the part of a tensor of ``shape`` that the rank at ``coordinate`` holds."""
    offsets, sizes = [0] * len(shape), list(shape)
    for count, spmd_type, index in zip(mesh.sizes, placement, coordinate):
        dim = shard_dim(spmd_type)
        if dim is not None:
            offset, sizes[dim] = part_of_dim(sizes[dim], count, index)
            offsets[dim] += offset
    return tuple(offsets), tuple(sizes)


def is_first_holder(placement: Placement, coordinate: tuple[int, ...]) -> bool:
    """Whether no rank before this one holds the same part."""
    return all(index == 0 or shard_dim(spmd_type) is not None for spmd_type, index in zip(placement, coordinate))


def torch_placements(types: Sequence[SpmdType]) -> tuple[TorchPlacement, ...]:
    """DTensor's placement on every axis of a parameter or buffer of these types: none of them is partial."""
    dims = [shard_dim(spmd_type) for spmd_type in types]
    return tuple(Replicate() if dim is None else Shard(dim) for dim in dims)
