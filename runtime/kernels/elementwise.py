"""Launching kernels that treat every element alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from runtime.kernels.language import tl, triton

#: Elements that one program of an elementwise kernel handles.
BLOCK = 1024


def wide_type(tensor: torch.Tensor) -> Any:
    """The type in which kernels compute: at least float32."""
    return tl.float64 if tensor.dtype == torch.float64 else tl.float32


class Rows(NamedTuple):
    """Tensors of one shape, each as rows that lie anywhere, with the elements of a row side by side."""

    tensors: Sequence[torch.Tensor]
    #: From one row to the next, for each tensor.
    strides: Sequence[int]
    width: int
    #: One program for each block of each row.
    grid: tuple[int]


def same_rows(*tensors: torch.Tensor, whole: bool = True) -> Rows:
    """Rows of the last dim; nothing is copied that can be read as such. ``whole``: contiguous tensors as one row."""
    whole = whole and all(tensor.is_contiguous() for tensor in tensors)
    width = tensors[0].numel() if whole else tensors[0].shape[-1]
    rows = [_side_by_side(tensor.reshape(-1, width)) for tensor in tensors]
    grid = (rows[0].shape[0] * triton.cdiv(width, BLOCK),)
    return Rows(rows, [tensor.stride(0) for tensor in rows], width, grid)


def _side_by_side(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton.jit
def block_of(width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's row and columns of ``Rows`` (64-bit), and which of the columns exist."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row, columns, columns < width
