"""How the kernels of chains find their elements: rows and columns of a space, by strides that may be 0.

``SPACE`` is ``(outer, middle, inner, width)``, a row being one of outer · middle · inner; an operand has a stride for
each of the four. An outer or middle size of 1 is None, and so is a stride of 0: which there are is known when a kernel
is compiled, how large they are is not, so that calls of other lengths run the same code. There are fewer than 2³¹ rows.
``TILE`` is the rows and columns that a program holds at once. What is written is contiguous in the space. Rows are
``[rows, 1]``, columns ``[1, columns]``, both 64-bit.
"""

from __future__ import annotations

from runtime.kernels.language import tl, triton


@triton.jit
def num_rows_of(SPACE):  # type: ignore[no-untyped-def]
    """Rows of a space."""
    num_rows = SPACE[2]
    if SPACE[1] is not None:
        num_rows = num_rows * SPACE[1]
    if SPACE[0] is not None:
        num_rows = num_rows * SPACE[0]
    return num_rows


@triton.jit
def whole_tile(SPACE, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's rows and columns, and which of their elements exist."""
    blocks = tl.cdiv(SPACE[3], TILE[1])
    program = tl.program_id(0)
    rows = ((program // blocks).to(tl.int64) * TILE[0] + tl.arange(0, TILE[0]))[:, None]
    columns = ((program % blocks).to(tl.int64) * TILE[1] + tl.arange(0, TILE[1]))[None, :]
    return rows, columns, (rows < num_rows_of(SPACE)) & (columns < SPACE[3])


@triton.jit
def share_of_rows(SPACE, TILE: tl.constexpr, SHARES):  # type: ignore[no-untyped-def]
    """The first row that this program walks through, the one behind its last, and its columns."""
    num_rows = num_rows_of(SPACE)
    rows_each = tl.cdiv(tl.cdiv(num_rows, SHARES), TILE[0]) * TILE[0]
    blocks = tl.cdiv(SPACE[3], TILE[1])
    program = tl.program_id(0)
    first = (program // blocks).to(tl.int64) * rows_each
    columns = ((program % blocks).to(tl.int64) * TILE[1] + tl.arange(0, TILE[1]))[None, :]
    return first, tl.minimum(first + rows_each, num_rows), columns


@triton.jit
def rows_from(start, last, columns, SPACE, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The next rows of a share, and which of their elements exist."""
    rows = (start + tl.arange(0, TILE[0]))[:, None]
    return rows, (rows < last) & (columns < SPACE[3])


@triton.jit
def load(ptr, STRIDES, rows, columns, exists, SPACE):  # type: ignore[no-untyped-def]
    offsets = rows * 0 + columns * 0
    if STRIDES[3] is not None:
        offsets += columns * STRIDES[3]
    if SPACE[1] is None:
        if STRIDES[2] is not None:
            offsets += rows * STRIDES[2]
    else:
        numbers = rows.to(tl.int32)  # which are divided faster
        if STRIDES[2] is not None:
            offsets += (numbers % SPACE[2]).to(tl.int64) * STRIDES[2]
        if STRIDES[1] is not None:
            middle = numbers // SPACE[2]
            if SPACE[0] is not None:
                middle = middle % SPACE[1]
            offsets += middle.to(tl.int64) * STRIDES[1]
        if (SPACE[0] is not None) and (STRIDES[0] is not None):
            offsets += (numbers // (SPACE[2] * SPACE[1])).to(tl.int64) * STRIDES[0]
    return tl.load(ptr + offsets, mask=exists, other=0)


@triton.jit
def store(ptr, values, rows, columns, exists, SPACE):  # type: ignore[no-untyped-def]
    tl.store(ptr + rows * SPACE[3] + columns, values, mask=exists)


@triton.jit
def store_rows(ptr, values, rows, SPACE):  # type: ignore[no-untyped-def]
    """One number for each row, of a program that holds whole rows."""
    tl.store(ptr + rows, values, mask=rows < num_rows_of(SPACE))


@triton.jit
def store_row_sums(ptr, values, rows, exists, SPACE, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over this program's columns: ``[blocks of columns, rows]``."""
    num_rows = num_rows_of(SPACE)
    block = tl.program_id(0).to(tl.int64) % tl.cdiv(SPACE[3], TILE[1])
    sums = tl.sum(tl.where(exists, values, 0.0), 1)[:, None]
    tl.store(ptr + block * num_rows + rows, sums, mask=rows < num_rows)


@triton.jit
def store_column_sums(ptr, total, columns, SPACE, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over this program's rows: ``[shares, width]``."""
    share = tl.program_id(0).to(tl.int64) // tl.cdiv(SPACE[3], TILE[1])
    tl.store(ptr + share * SPACE[3] + columns, tl.sum(total, 0)[None, :], mask=columns < SPACE[3])


@triton.jit
def store_sum(ptr, total, columns, SPACE, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of all that this program has seen: ``[programs]``."""
    tl.store(ptr + tl.program_id(0), tl.sum(total))
