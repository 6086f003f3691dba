"""``spmd_types``: its current mesh, the groups of axes, ranks under ``LocalTensorMode``, and a fault of 0.3."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from spmd_types import _collectives, _dtype_utils, _state
from spmd_types._local import _build_rank_to_group_local as places_in_group
from spmd_types._local import _get_local_tensor_mode as local_tensor_mode_of
from spmd_types._mesh import _pg_for_axis as group_of_axis

from runtime.torch_compat.process_groups import all_gather_along, reduce_scatter_along

__all__ = ["accept_any_stride_in_all_reduce", "group_of_axis", "local_tensor_mode_of", "mesh_of_thread",
           "places_in_group", "reduce_as_autocast_computes", "send_nothing_over_one_rank", "use_mesh"]  # fmt: skip


def mesh_of_thread() -> Any:
    """The mesh of ``spmd_types.set_current_mesh`` on this thread, for ``use_mesh``; None if there is none."""
    return _state._current_mesh_entry()


@contextlib.contextmanager
def use_mesh(mesh: Any) -> Iterator[None]:
    """``set_current_mesh`` with what ``mesh_of_thread`` gave, on any thread."""
    if mesh is None:
        yield
        return
    _state._push_mesh(mesh.axes, mesh.all_names, mesh.pgs, local_axes=mesh.local_axes)
    try:
        yield
    finally:
        _state._pop_mesh()


def accept_any_stride_in_all_reduce() -> None:
    """An all-reduce asserts a contiguous tensor (0.3), but gradients often are expanded or transposed views.

    For the whole process and for good: backward passes call it on threads of their own, at any time. Complex numbers
    that are only marked as conjugates (``ifft`` of real ones gives such) are written out: torch sends pairs of numbers.
    """
    original = _collectives._AllReduce.forward

    def forward(ctx: Any, x: torch.Tensor, axis: Any, dst: Any, inplace: bool, dtype_options: Any) -> torch.Tensor:
        return original(ctx, x if inplace else x.resolve_conj().contiguous(), axis, dst, inplace, dtype_options)

    _collectives._AllReduce.forward = staticmethod(forward)  # type: ignore[method-assign]


def send_nothing_over_one_rank() -> None:
    """All-gathers and reduce-scatters are issued also over one rank (0.3), other than all-reduces.

    It calls them by names at which torch 2.13 warns.

    Micro-batches divide the batch axis of a program, so its conversions are there with one data rank too.
    """
    _collectives.funcol = _OverSeveralRanks(_collectives.funcol)  # type: ignore[assignment]


def reduce_as_autocast_computes() -> None:
    """What autocast narrows, though it is float32 in the program, has its gradient reduced in its own dtype (0.3 asks).

    A program that is narrower itself says so of each conversion.
    """
    original = _dtype_utils._check_backward_options

    def check(*args: Any, **kwargs: Any) -> None:
        if not any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
            original(*args, **kwargs)

    _dtype_utils._check_backward_options = check  # type: ignore[assignment]


class _OverSeveralRanks:
    """Functional collectives, which leave a tensor as it is where the group is one rank."""

    def __init__(self, functional: Any) -> None:
        self._functional = functional

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functional, name)

    def all_gather_tensor(self, x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
        if dist.get_world_size(group) == 1:
            return x
        first, outer = _first_dim(x.resolve_conj(), dim)
        whole = all_gather_along(first, dim - len(outer), group)
        return whole.view(*outer, *whole.shape) if outer else whole

    def reduce_scatter_tensor(self, x: torch.Tensor, kind: str, dim: int, group: Any) -> torch.Tensor:
        if dist.get_world_size(group) == 1:
            return x
        first, outer = _first_dim(x.resolve_conj(), dim)
        part = reduce_scatter_along(first, kind, dim - len(outer), group)
        return part.view(*outer, *part.shape) if outer else part


def _first_dim(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """``x`` with ``dim`` as its first, and the dims of one element outside of it: parts of dim 0 need no copy. Where
    another has more elements, ``x`` as it is."""
    outer = tuple(x.shape[:dim])
    return (x.flatten(0, dim), outer) if dim and all(size == 1 for size in outer) else (x, ())
