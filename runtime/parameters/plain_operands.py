"""Plain tensors beside DTensors in an operator: whole values, which every rank has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from passes.torch_compat.operators import tree_leaves, tree_map
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
    hashes = torch.stack([_content(tensor) for tensor in tensors])
    extremes = torch.stack([hashes, ~hashes])
    for axis in (axis for axis in range(mesh.ndim) if mesh.size(axis) > 1):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    largest, smallest = extremes[0], ~extremes[1]
    if not torch.equal(largest, smallest):
        raise ValueError(
            "a plain tensor is combined with a parameter of a parallel module, or its gradient, and has other values "
            "on other ranks: what is random must be drawn from one seed, and parts must be DTensors"
        )


def _content(tensor: torch.Tensor) -> torch.Tensor:
    """An integer that tells tensors apart by their values and where those stand."""
    values = tensor.detach().double().flatten()
    places = torch.arange(1, len(values) + 1, dtype=torch.float64, device=values.device)
    return torch.hash_tensor(values * places).view(torch.int64)
