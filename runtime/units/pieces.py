"""Which piece of a parameter a rank owns when several ranks share its state (ZeRO 1 to 3)."""

from __future__ import annotations

from collections.abc import Sequence


def piece_dim(shape: Sequence[int], group_size: int) -> int:
    """The dim that is cut: the first that the group divides evenly, else dim 0."""
    for dim, size in enumerate(shape):
        if size and size % group_size == 0:
            return dim
    return 0


def piece_of(shape: Sequence[int], group_size: int, rank: int) -> tuple[int, int, int]:
    """The piece of a tensor of ``shape`` that ``rank`` of ``group_size`` ranks owns: ``(dim, offset, length)``.

    All other dims are whole. Where no dim divides evenly, dim 0 is cut as ``torch.chunk`` cuts it: pieces of
    ``ceil(size / group_size)``, the last ones shorter or empty. A tensor without dims belongs to rank 0: there the
    dim is 0 and the length (1 or 0) says whether the rank owns it.
    """
    dim = piece_dim(shape, group_size)
    size = shape[dim] if shape else 1
    length = -(-size // group_size)
    offset = min(rank * length, size)
    return dim, offset, min(length, size - offset)


def piece_shape(shape: Sequence[int], group_size: int, rank: int) -> tuple[int, ...]:
    """Shape of that piece; of a tensor without dims ``()`` on rank 0 and ``(0,)`` on the others."""
    dim, _, length = piece_of(shape, group_size, rank)
    if not shape:
        return () if length else (0,)
    return (*shape[:dim], length, *shape[dim + 1 :])
