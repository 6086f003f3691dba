"""Rows a block at a time: copies in a wider dtype, and what is computed of them, stay small beside the rows."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Elements of the widest operand that are computed at a time: 128 MiB in float32.
BLOCK = 2**25


def in_row_blocks(function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
    """``function`` of operands with one first dim, of which it computes every row by itself.

    Example:
        >>> rows = torch.ones(3, 2, dtype=torch.bfloat16)
        >>> in_row_blocks(lambda some: some.float().sum(1), rows)
        tensor([2., 2., 2.])
    """
    count = len(operands[0])
    size = max(1, BLOCK * count // max(1, *(operand.numel() for operand in operands)))
    if count <= size:
        return function(*operands)
    result = None
    for start in range(0, count, size):
        some = function(*(operand[start : start + size] for operand in operands))
        if result is None:
            result = some.new_empty((count, *some.shape[1:]))
        result[start : start + size] = some
    assert result is not None
    return result
