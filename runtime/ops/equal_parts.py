"""Parts of unequal length: zeros behind them for a collective, which needs equal ones, and away again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F

from passes.ir.types import part_of_dim
from runtime.ops.mesh_types import groups_of
from runtime.torch_compat.spmd_internals import local_tensor_mode_of, places_in_group

#: A length; of virtual ranks one for each.
Length = int | Mapping[int, int]


def padded(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """``x`` with zeros behind it, ``size`` long in ``dim``; its type on every axis stays as it is."""
    result: torch.Tensor = _Resized.apply(x, dim, size)
    return result


def trimmed(x: torch.Tensor, dim: int, size: int, axis: str | None = None) -> torch.Tensor:
    """``x`` cut off in ``dim`` to ``size``, or to this rank's part of ``size`` entries that a mesh axis cuts."""
    result: torch.Tensor = _Resized.apply(x, dim, size if axis is None else own_length(x, size, axis))
    return result


def own_length(like: torch.Tensor, size: int, axis: str) -> Length:
    """How many of ``size`` entries, cut over a mesh axis, this rank holds, or each of the ranks of ``like``."""
    (group,) = groups_of((axis,))
    count = dist.get_world_size(group)
    mode = local_tensor_mode_of(like)
    if mode is None:
        return part_of_dim(size, count, dist.get_rank(group))[1]
    places = places_in_group(group)
    return {rank: part_of_dim(size, count, places[rank])[1] for rank in mode.ranks}


class _Resized(torch.autograd.Function):
    """Zeros behind, or entries cut off at the end, in one dim; so is the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, length: Length) -> torch.Tensor:
        ctx.dim, ctx.before = dim, _length_of(x, dim)
        return _each(x, lambda tensor, size: _resized(tensor, dim, size), length)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return _Resized.apply(grad, ctx.dim, ctx.before), None, None

    @staticmethod
    def spmd_typecheck(*, x: torch.Tensor) -> Any:
        return spmd.rules.einsum("...->...", x, linear_in=(0,))


def _length_of(x: torch.Tensor, dim: int) -> Length:
    if local_tensor_mode_of(x) is None:
        return x.shape[dim]
    from runtime.torch_compat.local_tensors import parts_of_ranks

    return {rank: part.shape[dim] for rank, part in parts_of_ranks(x).items()}


def _each(x: torch.Tensor, resize: Callable[[torch.Tensor, int], torch.Tensor], length: Length) -> torch.Tensor:
    mode = local_tensor_mode_of(x)
    if mode is None:
        assert isinstance(length, int)
        return resize(x, length)
    lengths = length if isinstance(length, Mapping) else dict.fromkeys(mode.ranks, length)
    result: torch.Tensor = mode.tensor_map(x, lambda rank, tensor: resize(tensor, lengths[rank]))
    return result


def _resized(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """A tensor of its own: what an autograd function gives must be no view of what it takes."""
    extra = length - x.shape[dim]
    if extra > 0:
        return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, extra))
    return x.narrow(dim, 0, length).clone(memory_format=torch.contiguous_format)
