"""Launching kernels in which a program handles whole rows: a tensor is ``[rows, width]``, its last dim a row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from runtime.kernels.device import processors_of
from runtime.kernels.elementwise import wide_type
from runtime.kernels.language import tl, triton

#: Elements in a tile of several narrow rows.
_NARROW_TILE = 2048
#: Columns of a tile that is moved along a row too wide to be held.
_MOVING_TILE = 8192
_ELEMENTS_PER_WARP = 512
_MOST_WARPS = 32
#: Warps on one multiprocessor, over all programs that walk through the rows.
_WALKING_WARPS = 16
#: Multiprocessors of a device without any: few, so that every program walks through several tiles.
_INTERPRETED_PROCESSORS = 1
#: Elements that the ATen versions process at once: few enough for a cache, enough to occupy every core.
ATEN_BLOCK = 2**18
#: Rows and columns of the partial sums that one step of their reduction takes.
_PARTIAL_ROWS, _PARTIAL_COLUMNS = 64, 32


@dataclass(frozen=True)
class Tile:
    """Rows and columns (powers of two) that a program holds at once.

    Attributes:
        whole: whether rows fit; else the program moves along them.
    """

    rows: int
    columns: int
    num_warps: int
    whole: bool


def tile_of(width: int, *, widest: int) -> Tile:
    """The tile for rows of ``width`` elements, of which a program can hold ``widest``."""
    columns = 1 << max(width - 1, 0).bit_length()
    if columns > widest:
        columns = min(widest, _MOVING_TILE)
        return Tile(rows=1, columns=columns, num_warps=_warps_of(columns), whole=False)
    rows = max(1, _NARROW_TILE // columns)
    return Tile(rows=rows, columns=columns, num_warps=_warps_of(rows * columns), whole=True)


def _warps_of(elements: int) -> int:
    return max(1, min(_MOST_WARPS, elements // _ELEMENTS_PER_WARP))


def tiles_over(num_rows: int, tile: Tile) -> int:
    """Programs needed where each handles one tile of rows."""
    return -(-num_rows // tile.rows)


def walkers_over(num_rows: int, tile: Tile, device: torch.device) -> int:
    """Programs that together fill the device, each walking through many tiles and summing over them."""
    per_processor = max(1, _WALKING_WARPS // tile.num_warps)
    return min(tiles_over(num_rows, tile), processors_of(device, elsewhere=_INTERPRETED_PROCESSORS) * per_processor)


def size_of_rows(tensor: torch.Tensor) -> tuple[int, int]:
    """``(rows, width)`` of a tensor whose rows are its last dim."""
    return math.prod(tensor.shape[:-1]), tensor.shape[-1]


def is_one_block(like: torch.Tensor, count: int) -> bool:
    """Whether a processor (that of ``like``) treats ``count`` elements at once: operators on all are then quickest."""
    return like.is_cpu and 0 < count <= ATEN_BLOCK


def rows_at_once(width: int) -> int:
    """Rows that a processor treats at a time."""
    return max(1, ATEN_BLOCK // max(1, width))


def row_blocks(first: torch.Tensor, *others: torch.Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Tensors of one shape as ``[rows, width]``, and of those a block at a time (what is None stays None).

    Temporaries of a block stay in a processor's cache; elsewhere there is one block of all rows.
    """
    num_rows, width = size_of_rows(first)
    flat = [None if tensor is None else tensor.reshape(num_rows, width) for tensor in (first, *others)]
    step = rows_at_once(width) if first.device.type == "cpu" else max(1, num_rows)
    if 0 < num_rows <= step:
        yield tuple(flat)
        return
    for start in range(0, num_rows, step):
        yield tuple(None if tensor is None else tensor[start : start + step] for tensor in flat)


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, total_ptr, num_partials, width, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
    for start in range(0, num_partials, ROWS):
        rows = start + tl.arange(0, ROWS)
        exists = (rows < num_partials)[:, None] & (columns < width)[None, :]
        total += tl.load(partial_ptr + rows[:, None].to(tl.int64) * width + columns[None, :], mask=exists, other=0.0)
    tl.store(total_ptr + columns, tl.sum(total, 0), mask=columns < width)


def sum_partials(partials: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of ``[programs, width]`` over its programs, always in the same order, rounded once to ``dtype``."""
    num_partials, width = partials.shape
    total = partials.new_empty(width, dtype=dtype)
    _sum_kernel[(-(-width // _PARTIAL_COLUMNS),)](
        partials, total, num_partials, width, WIDE=wide_type(partials), ROWS=_PARTIAL_ROWS, COLUMNS=_PARTIAL_COLUMNS
    )
    return total
