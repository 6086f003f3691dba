"""Parts of parameters that are whole on one rank of every island, whatever the islands' plans.

A plan cuts a parameter into rectangles. Of several plans, the cuts of all of them in every dim make a grid: each of its
cells lies within one rectangle of each island. Where copies of a rectangle are on several ranks of an island, the cell
is cut further, so that each of them sends a share of it and none sends it twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

#: Offsets and sizes of a part of a tensor.
Extent = tuple[tuple[int, ...], tuple[int, ...]]
#: Rectangle → the ranks of one island that hold it.
Holders = Mapping[Extent, tuple[int, ...]]


@dataclass(frozen=True)
class SharedCell:
    """A part of a parameter that islands exchange.

    Attributes:
        name: the parameter's.
        offsets, sizes: of the cell in the whole parameter.
        senders: the rank of each island that exchanges it with those of the others.
        holders: all ranks of each island that hold it.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    senders: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]

    def of(self, part: torch.Tensor, offsets: tuple[int, ...]) -> torch.Tensor:
        """The view of this cell in ``part``, which begins at ``offsets`` of the whole parameter."""
        for dim, (begin, size) in enumerate(zip(self.offsets, self.sizes)):
            part = part.narrow(dim, begin - offsets[dim], size)
        return part


def shared_cells(name: str, islands: Sequence[Holders]) -> list[SharedCell]:
    """The cells of a parameter, of which each island says who holds which rectangle.

    Raises:
        ValueError: if an island does not hold a part that another one holds.
    """
    extents = [extent for holders in islands for extent in holders]
    num_dims = len(extents[0][0])
    cuts = [sorted({edge for offsets, sizes in extents for edge in (offsets[dim], offsets[dim] + sizes[dim])})
            for dim in range(num_dims)]  # fmt: skip
    cells: list[SharedCell] = []
    for corner in itertools.product(*(itertools.pairwise(edges) for edges in cuts)):
        offsets, sizes = tuple(low for low, _ in corner), tuple(high - low for low, high in corner)
        holders = tuple(_holders_around(name, holders, offsets) for holders in islands)
        cells += _cut_among_copies(name, offsets, sizes, holders)
    return cells


def _holders_around(name: str, holders: Holders, corner: tuple[int, ...]) -> tuple[int, ...]:
    for (offsets, sizes), ranks in holders.items():
        if all(low <= at < low + size for at, low, size in zip(corner, offsets, sizes)):
            return ranks
    raise ValueError(f"no rank of an island holds {name!r} at {list(corner)}: all islands must train the same model")


def _cut_among_copies(
    name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], holders: tuple[tuple[int, ...], ...]
) -> Iterator[SharedCell]:
    dim = max(range(len(sizes)), key=lambda place: sizes[place], default=None)
    length = 1 if dim is None else sizes[dim]
    pieces = min(max(map(len, holders)), length)
    for piece in range(pieces):
        begin, end = piece * length // pieces, (piece + 1) * length // pieces
        senders = tuple(ranks[piece % len(ranks)] for ranks in holders)
        low, size = list(offsets), list(sizes)
        if dim is not None:
            low[dim], size[dim] = offsets[dim] + begin, end - begin
        yield SharedCell(name, tuple(low), tuple(size), senders, holders)
