"""Which piece of a parameter a rank owns when several ranks share its state (ZeRO 1 to 3)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def piece_dim(shape: Sequence[int], group_size: int, uneven: Collection[int] = ()) -> int:
    """The dim that is cut: the first that the group divides evenly, else dim 0.

    A dim of ``uneven`` is longer on some ranks than on others and so divided evenly by none.
    """
    for dim, size in enumerate(shape):
        if dim not in uneven and size and size % group_size == 0:
            return dim
    return 0


def piece_ranks(data_ranks: int, zero_ranks: int) -> int:
    """Over how many neighbours of the ranks that hold a tensor alike its pieces are divided.

    ``zero_ranks``: as the plan says (``StepPlan.zero_ranks``), 0 for all.
    """
    return math.gcd(data_ranks, zero_ranks)


def piece_of(shape: Sequence[int], group_size: int, rank: int, dim: int | None = None) -> tuple[int, int, int]:
    """The piece of a tensor of ``shape`` that ``rank`` of ``group_size`` ranks owns: ``(dim, offset, length)``.

    All dims but ``dim`` (that of ``piece_dim``) are whole. Where no dim divides evenly, dim 0 is cut as ``torch.chunk``
    cuts it: pieces of ``ceil(size / group_size)``, the last ones shorter or empty. A tensor without dims is whole on
    every rank: ``(0, 0, 1)``.
    """
    dim = piece_dim(shape, group_size) if dim is None else dim
    size = shape[dim] if shape else group_size
    length = -(-size // group_size)
    offset = min(rank * length, size) if shape else 0
    return dim, offset, min(length, size - offset)


def piece_shape(shape: Sequence[int], group_size: int, rank: int, dim: int | None = None) -> tuple[int, ...]:
    """Shape of that piece."""
    if not shape:
        return ()
    dim, _, length = piece_of(shape, group_size, rank, dim)
    return (*shape[:dim], length, *shape[dim + 1 :])


def piece(whole: torch.Tensor, group_size: int, rank: int, dim: int | None = None) -> torch.Tensor:
    """That piece of ``whole``: a view."""
    if not whole.dim():
        return whole
    dim, offset, length = piece_of(whole.shape, group_size, rank, dim)
    return whole.narrow(dim, offset, length)
