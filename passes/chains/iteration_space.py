"""A chain's iteration space as rows and columns, and where an operand's elements lie in it.

A space of any rank is folded to ``(outer, middle, inner, width)``: rows are counted by the first three, columns by
the last. An operand has a stride for each, 0 where it is broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Sizes of a space or strides of an operand: outer, middle, inner, width.
Fold = tuple[int, int, int, int]
ROW_LEVELS = 3

#: How an operand's gradient is summed: not at all, over the rows, along each row, over both, or otherwise.
FULL, ROW, COLUMN, SCALAR, OTHER = "full", "row", "column", "scalar", "other"


def fold(
    shape: Sequence[int], strides: Sequence[Sequence[int]], *, columns: int
) -> tuple[Fold, tuple[Fold, ...]] | None:
    """Sizes and the strides of every operand; None if they need more levels.

    Args:
        shape: of the space.
        strides: for each operand, one for each dim, 0 where it is broadcast.
        columns: how many trailing dims are columns; 0 for as many as lie side by side.
    """
    split = len(shape) - columns
    rows = _merged(shape, strides, range(split))
    if columns:
        width = _merged(shape, strides, range(split, len(shape)))
    else:
        width, rows = rows[-1:], rows[:-1]
    if len(rows) > ROW_LEVELS or len(width) > 1:
        return None
    levels = [(1, (0,) * len(strides))] * (ROW_LEVELS - len(rows)) + rows + (width or [(1, (0,) * len(strides))])
    sizes = tuple(size for size, _ in levels)
    folded = tuple(tuple(steps[index] for _, steps in levels) for index in range(len(strides)))
    return sizes, folded  # type: ignore[return-value]


def _merged(shape: Sequence[int], strides: Sequence[Sequence[int]], dims: range) -> list[tuple[int, tuple[int, ...]]]:
    """Dims as (size, stride of every operand), neighbours as one where every operand walks through them alike."""
    levels: list[tuple[int, tuple[int, ...]]] = []
    for dim in dims:
        size, steps = shape[dim], tuple(operand[dim] for operand in strides)
        if size == 1:
            continue
        if levels and all(before == size * step for before, step in zip(levels[-1][1], steps)):
            levels[-1] = (levels[-1][0] * size, steps)
        else:
            levels.append((size, steps))
    return levels


def contiguous_strides(shape: Sequence[int], space: Sequence[int]) -> tuple[int, ...]:
    """Strides in ``space`` of a tensor of ``shape`` that lies in the order of its dims."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(0 if size == 1 else step)
        step *= size
    return (0,) * (len(space) - len(shape)) + tuple(reversed(strides))


def kind_of(shape: Sequence[int], space: Sequence[int], *, columns: int) -> str:
    """How the gradient of an operand of ``shape`` is summed from that of the space; exact for the split ``columns``."""
    padded = (1,) * (len(space) - len(shape)) + tuple(shape)
    if padded == tuple(space):
        return FULL
    if all(size == 1 for size in padded):
        return SCALAR
    split = len(space) - columns
    rows_same, columns_same = padded[:split] == tuple(space[:split]), padded[split:] == tuple(space[split:])
    if columns and columns_same and all(size == 1 for size in padded[:split]):
        return ROW
    if columns and rows_same and all(size == 1 for size in padded[split:]):
        return COLUMN
    return OTHER


def best_split(shapes: Sequence[Sequence[int]], space: Sequence[int]) -> int:
    """The number of column dims for which the fewest of these operands' gradients need a sum of their own.

    0 if none is broadcast: columns are then whatever lies side by side.
    """
    broadcast = [shape for shape in shapes if kind_of(shape, space, columns=0) != FULL]
    if not broadcast:
        return 0
    return min(
        range(1, len(space) + 1),
        key=lambda columns: sum(kind_of(shape, space, columns=columns) == OTHER for shape in broadcast),
    )
