"""How the kernels of chains find their elements: rows and columns of a space, by strides that may be 0.

``SPACE`` is ``(outer, middle, inner, width)``, a row being one of outer · middle · inner; an operand has a stride for
each of the four. ``TILE`` is the rows and columns that a program holds at once. What is written is
contiguous in the space. Rows are ``[rows, 1]``, columns ``[1, columns]``, both 64-bit.
"""

from __future__ import annotations

from runtime.kernels.language import tl, triton


@triton.jit
def whole_tile(SPACE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's rows and columns, and which of their elements exist."""
    blocks = tl.cdiv(SPACE[3], TILE[1])
    program = tl.program_id(0).to(tl.int64)
    rows = ((program // blocks) * TILE[0] + tl.arange(0, TILE[0]))[:, None]
    columns = ((program % blocks) * TILE[1] + tl.arange(0, TILE[1]))[None, :]
    return rows, columns, (rows < SPACE[0] * SPACE[1] * SPACE[2]) & (columns < SPACE[3])


@triton.jit
def share_of_rows(SPACE: tl.constexpr, TILE: tl.constexpr, SHARES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first row that this program walks through, the one behind its last, and its columns."""
    num_rows = SPACE[0] * SPACE[1] * SPACE[2]
    rows_each = tl.cdiv(tl.cdiv(num_rows, SHARES), TILE[0]) * TILE[0]
    blocks = tl.cdiv(SPACE[3], TILE[1])
    program = tl.program_id(0).to(tl.int64)
    first = (program // blocks) * rows_each
    columns = ((program % blocks) * TILE[1] + tl.arange(0, TILE[1]))[None, :]
    return first, tl.minimum(first + rows_each, num_rows), columns


@triton.jit
def rows_from(start, last, columns, SPACE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The next rows of a share, and which of their elements exist."""
    rows = (start + tl.arange(0, TILE[0]))[:, None]
    return rows, (rows < last) & (columns < SPACE[3])


@triton.jit
def load(ptr, STRIDES: tl.constexpr, rows, columns, exists, SPACE: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = rows % SPACE[2] * STRIDES[2]
    if SPACE[1] > 1:
        offsets += rows // SPACE[2] % SPACE[1] * STRIDES[1]
    if SPACE[0] > 1:
        offsets += rows // (SPACE[2] * SPACE[1]) * STRIDES[0]
    return tl.load(ptr + offsets + columns * STRIDES[3], mask=exists, other=0)


@triton.jit
def store(ptr, values, rows, columns, exists, SPACE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(ptr + rows * SPACE[3] + columns, values, mask=exists)


@triton.jit
def store_rows(ptr, values, rows, SPACE: tl.constexpr):  # type: ignore[no-untyped-def]
    """One number for each row, of a program that holds whole rows."""
    tl.store(ptr + rows, values, mask=rows < SPACE[0] * SPACE[1] * SPACE[2])


@triton.jit
def store_row_sums(ptr, values, rows, exists, SPACE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over this program's columns: ``[blocks of columns, rows]``."""
    num_rows = SPACE[0] * SPACE[1] * SPACE[2]
    block = tl.program_id(0).to(tl.int64) % tl.cdiv(SPACE[3], TILE[1])
    sums = tl.sum(tl.where(exists, values, 0.0), 1)[:, None]
    tl.store(ptr + block * num_rows + rows, sums, mask=rows < num_rows)


@triton.jit
def store_column_sums(ptr, total, columns, SPACE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over this program's rows: ``[shares, width]``."""
    share = tl.program_id(0).to(tl.int64) // tl.cdiv(SPACE[3], TILE[1])
    tl.store(ptr + share * SPACE[3] + columns, tl.sum(total, 0)[None, :], mask=columns < SPACE[3])


@triton.jit
def store_sum(ptr, total, columns, SPACE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of all that this program has seen: ``[programs]``."""
    tl.store(ptr + tl.program_id(0), tl.sum(total))
