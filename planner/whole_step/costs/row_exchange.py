"""What exchanging the shards of its rows costs a product beside the collectives: smaller products, and copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from passes.rules.rule import pieces_of_rows

#: (batch, m, n, k) of a product.
Shape = tuple[int, int, int, int]


class RowExchange(NamedTuple):
    """How a product of this rank runs where it gathers or scatters its rows (``runtime.ops.row_shards``).

    Attributes:
        shape: of the whole product, with the rows of all ranks.
        pieces: as many products of equally many rows, forward and for the input's gradient.
        copied: elements read and written besides, forward and backward, as pieces are laid out by ranks and back.
    """

    shape: Shape
    pieces: int
    copied: tuple[float, float]


def row_exchange(shape: Shape, source: Sequence[int], output: Sequence[int]) -> RowExchange:
    """Of the product ``shape`` of local tensors ``source`` [..., rows, k] and ``output`` [..., rows, n].

    Their rows differ where they are exchanged: gathered rows are more behind the product, scattered ones before it.
    """
    rows, left = (tensor[-2] if len(tensor) > 1 else 1 for tensor in (source, output))
    if rows == left:
        return RowExchange(shape, 1, (0.0, 0.0))
    batch, m, n, k = shape
    pieces = pieces_of_rows(min(rows, left))
    if rows < left:
        wide = float(math.prod(output))
        return RowExchange(shape, pieces, (2 * wide, 4 * wide))
    wide, gathered = float(math.prod(source)), float(math.prod(output) * rows // left)
    return RowExchange((batch, m * rows // left, n, k), pieces, (2 * wide, 4 * wide + 2 * gathered))


def workspace(source: Sequence[int], output: Sequence[int]) -> float:
    """Elements that such a product holds besides, at most: backward, twice the rows of all ranks on the side where they
    are cut (they and their sums, or both orders of them), and the other side once more.
    """
    rows, left = (tensor[-2] if len(tensor) > 1 else 1 for tensor in (source, output))
    if rows == left:
        return 0.0
    ranks = max(rows, left) // min(rows, left)
    cut, whole = (source, output) if rows < left else (output, source)
    return float(2 * ranks * math.prod(cut) + math.prod(whole))
