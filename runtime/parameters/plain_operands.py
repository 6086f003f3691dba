"""Plain tensors beside DTensors in an operator: whole values, which every rank has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from passes.torch_compat.operators import tree_leaves, tree_map
from runtime.agreement.call_contents import digest
from runtime.torch_compat.dtensors import dtensor_over, dtensor_spec


def is_plain(value: Any) -> bool:
    """Whether ``value`` is a tensor that is no DTensor, and more than a number (which DTensor takes as it is)."""
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.dim() > 0


def with_whole_operands(arguments: Any, beside: DTensor) -> Any:
    """``arguments`` with DTensors over the memory of plain tensors, the same on all ranks of the mesh of ``beside``.

    Raises:
        ValueError: on all ranks, if a plain tensor has other values on another rank.
    """
    mesh = beside.device_mesh
    plain = [leaf for leaf in tree_leaves(arguments) if is_plain(leaf)]
    if not plain:
        return arguments
    _check_alike(plain, mesh)

    def whole(leaf: Any) -> Any:
        if not is_plain(leaf):
            return leaf
        spec = dtensor_spec(leaf.shape, leaf.dtype, mesh, [Replicate()] * mesh.ndim)
        return dtensor_over(DTensor, leaf, spec)

    return tree_map(whole, arguments)


def _check_alike(tensors: list[torch.Tensor], mesh: DeviceMesh) -> None:
    sums = [digest(tensor) for tensor in tensors]
    extremes = torch.tensor([*sums, *(-one for one in sums)], device=tensors[0].device)
    for axis in (axis for axis in range(mesh.ndim) if mesh.size(axis) > 1):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    largest, smallest = extremes[: len(sums)], -extremes[len(sums) :]
    if not torch.equal(largest, smallest):
        raise ValueError(
            "a plain tensor is combined with a parameter of a parallel module, or its gradient, and has other values "
            "on other ranks: what is random must be drawn from one seed, and parts must be DTensors"
        )
