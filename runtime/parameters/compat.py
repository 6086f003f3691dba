"""What torch's DTensor and foreach operators have but do not export: all of it here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement


def dtensor_spec(
    shape: Sequence[int], dtype: torch.dtype, device_mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensorSpec:
    """How a contiguous DTensor of ``shape`` lies on a mesh."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    meta = TensorMeta(torch.Size(shape), tuple(reversed(strides)) if shape else (), dtype)
    return DTensorSpec(device_mesh, tuple(placements), tensor_meta=meta)


def dtensor_over(kind: type[DTensor], local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool = False) -> Any:
    """A DTensor of class ``kind`` whose part on this rank is ``local`` itself (``from_local`` needs even parts)."""
    return kind(local, spec, requires_grad=requires_grad)  # type: ignore[call-arg]


def part_on_mesh(
    shape: Sequence[int], device_mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and offsets of this rank's part of a DTensor."""
    sizes, offsets = compute_local_shape_and_global_offset(torch.Size(shape), device_mesh, list(placements))
    return tuple(sizes), tuple(offsets)


def use_foreach_on(kind: type[torch.Tensor]) -> None:
    """Let optimizers and clipping work on lists of tensors of class ``kind``, as they do on DTensors."""
    from torch.utils._foreach_utils import _foreach_supported_types

    _foreach_supported_types.append(kind)
