"""The tiles with which a chain's kernel runs: a small cost model ranks them, the best few may be measured.

These kernels are bound by memory. What a tile costs over the bytes that must move is: elements of it that lie outside
of the space, accesses that fill a part of a memory transaction only, programs that do not fill the last round of the
multiprocessors, too few bytes on the way at once (Little's law: latency × bandwidth of a GPU is some tens of kilobytes
a multiprocessor), and the start of each program.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

#: Powers of two for the elements that a program holds of one tensor.
_SMALLEST, _LARGEST = 256, 4096
#: A warp of threads moves so many bytes at once.
_TRANSACTION = 128
#: Bytes that a multiprocessor needs on the way to keep memory busy.
_IN_FLIGHT = 32768
_MOST_WARPS_OF_PROCESSOR = 64
_WARPS = (1, 2, 4, 8)
#: A whole row's program may have as many warps as a device allows.
_MOST_WARPS = 32
#: What starting a program costs, as bytes that could have moved meanwhile.
_START = 512
#: 32-bit values that a thread can hold besides addresses, masks and what functions need.
_REGISTERS = 64
#: Candidates that are measured.
NUM_MEASURED = 5
#: Multiprocessors of a device that is none.
DEFAULT_PROCESSORS = 8


class TileChoice(NamedTuple):
    """Rows and columns that a program holds, and its warps."""

    rows: int
    columns: int
    num_warps: int


@functools.lru_cache(maxsize=4096)
def ranked_tiles(
    num_rows: int,
    width: int,
    *,
    item_bytes: int,
    tensors: int,
    processors: int,
    whole_rows: bool,
    operands: int | None = None,
) -> tuple[TileChoice, ...]:
    """The most promising tiles, best first.

    Args:
        item_bytes: of an element of the space, over all tensors that are read and written.
        tensors: how many these are.
        processors: multiprocessors of the device.
        operands: how many tensors are read and written at all, broadcast ones too (default: ``tensors``).
        whole_rows: a program holds all of each of its rows.
    """
    choices = [
        TileChoice(elements // columns, columns, warps)
        for columns in _columns(width, whole_rows=whole_rows)
        for elements in _powers(max(columns, _SMALLEST), max(columns, _LARGEST))
        for warps in (*_WARPS, *((16, _MOST_WARPS) if columns > _LARGEST else ()))
        if elements // columns <= _power_above(num_rows) or elements == max(columns, _SMALLEST)
    ]

    words = max(1.0, item_bytes / max(1, tensors) / 4) * ((operands or tensors) + 1)
    fitting = [tile for tile in choices if _per_thread(tile) * words <= _REGISTERS]
    choices = fitting or [min(choices, key=_per_thread)]

    def cost(tile: TileChoice) -> float:
        return _cost(tile, num_rows, width, item_bytes=item_bytes, tensors=tensors, processors=processors)

    return tuple(sorted(dict.fromkeys(choices), key=lambda tile: (cost(tile), tile))[:NUM_MEASURED])


def _per_thread(tile: TileChoice) -> float:
    """Elements of one tensor that a thread holds."""
    return tile.rows * tile.columns / (32 * tile.num_warps)


def _cost(tile: TileChoice, num_rows: int, width: int, *, item_bytes: int, tensors: int, processors: int) -> float:
    """Time over that of moving the bytes alone."""
    elements = tile.rows * tile.columns
    programs = -(-num_rows // tile.rows) * -(-width // tile.columns)
    outside = programs * elements / max(1, num_rows * width)
    line = min(tile.columns, width) * item_bytes / max(1, tensors)
    partly_used = math.ceil(line / _TRANSACTION) * _TRANSACTION / line if tile.columns < width else 1.0
    resident = max(1, _MOST_WARPS_OF_PROCESSOR // tile.num_warps)
    rounds = programs / (processors * resident)
    idle = math.ceil(rounds) / rounds if rounds > 1 else 1.0
    bytes_in_flight = min(resident, programs / processors) * elements * item_bytes
    waiting = max(1.0, _IN_FLIGHT / max(1.0, bytes_in_flight)) ** 0.5
    starting = 1 + _START / (elements * item_bytes)
    return outside * partly_used * idle * waiting * starting


def _columns(width: int, *, whole_rows: bool) -> list[int]:
    whole = _power_above(width)
    if whole_rows:
        return [whole]
    return _powers(min(whole, 64), min(whole, _LARGEST))


def _powers(first: int, last: int) -> list[int]:
    return [1 << bits for bits in range(first.bit_length() - 1, last.bit_length())]


def _power_above(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
