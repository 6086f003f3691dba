"""Rows in groups whose sizes weights decide: ``x.split(counts.tolist())``, computed group by group, joined again.

Rows that are sorted by their expert are cut into one piece for each expert, by ``split`` or slice by slice. The sizes
that Python reads are made-up numbers, like those of rows that a mask picks (``picked_rows``), and the pieces are such
rows: those of which the group is the expert. Pieces that are joined in their order are put at the places where their
masks are true.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from passes.capture.value_reads import ValueReads

#: Most groups whose sizes are read.
_MOST_GROUPS = 1024


class _Groups:
    """Groups of rows that lie behind one another.

    Attributes:
        counts: how many rows each has.
        numbers: the same, as made up.
        masks: number of rows of all groups together → for each group, which rows are its own.
    """

    def __init__(self, counts: torch.Tensor, numbers: Sequence[int]) -> None:
        self.counts = counts
        self.numbers = numbers
        self.masks: dict[int, list[torch.Tensor]] = {}


class _Size(int):
    """The number of rows of ``groups`` from ``first`` to before ``last``."""

    groups: _Groups
    first: int
    last: int

    def __add__(self, other: int) -> int:
        if isinstance(other, _Size):
            follows = other.groups is self.groups and other.first == self.last
            return _size(int(self) + int(other), self.groups, self.first, other.last) if follows else int(self) + other
        return self if other == 0 else int(self) + other

    def __radd__(self, other: int) -> int:
        return self + other


def _size(number: int, groups: _Groups, first: int, last: int) -> _Size:
    size = _Size(number)
    size.groups, size.first, size.last = groups, first, last
    return size


class RowGroups:
    """Answers the calls of one trace that read sizes of groups, cut rows into groups, or join these.

    Args:
        reads: knows which values weights decide.
    """

    def __init__(self, reads: ValueReads) -> None:
        self._reads = reads
        self._groups: list[_Groups] = []

    def call(self, function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What ``split``, ``cat`` or a slice gives where it is about such groups; None for other calls."""
        if not self._groups or not args:
            return None
        if function == "__getitem__" and isinstance(args[1], slice):
            return self._sliced(args[0], args[1])
        if function in _SPLITS and len(args) > 1 and (args[2:] or (kwargs.get("dim", 0),)) == (0,):
            return self._split(args[0], args[1])
        if function in _JOINS and (args[1:] or (kwargs.get("dim", 0),)) == (0,):
            return self._joined(args[0])
        return None

    def sizes(self, counts: torch.Tensor) -> list[int] | None:
        """What ``counts.tolist()`` gives if weights decide it; None if they do not."""
        if counts.dim() != 1 or counts.dtype not in (torch.int32, torch.int64) or len(counts) > _MOST_GROUPS:
            return None
        numbers = self._reads.sizes_of_groups(counts)
        if numbers is None:
            return None
        groups = _Groups(counts, numbers)
        self._groups.append(groups)
        return [_size(number, groups, place, place + 1) for place, number in enumerate(numbers)]

    def _split(self, rows: torch.Tensor, sizes: Any) -> tuple[torch.Tensor, ...] | None:
        groups = _groups_of(sizes)
        if groups is None or not rows.dim():
            return None
        return tuple(rows[mask] for mask in self._masks(groups, rows.shape[0]))

    def _sliced(self, rows: torch.Tensor, index: slice) -> torch.Tensor | None:
        """The rows of one group, which begin behind those of all groups before it."""
        start, stop = index.start, index.stop
        if not isinstance(stop, _Size) or stop.first or index.step is not None:
            return None
        if isinstance(start, _Size):
            group = start.last if start.groups is stop.groups and not start.first else -1
        else:
            group = 0 if start in (None, 0) else -1
        return rows[self._masks(stop.groups, rows.shape[0])[group]] if group == stop.last - 1 else None

    def _masks(self, groups: _Groups, num_rows: int) -> list[torch.Tensor]:
        """Which of the rows are those of each group."""
        if num_rows not in groups.masks:
            group = torch.repeat_interleave(groups.counts, output_size=num_rows)
            groups.masks[num_rows] = [group == place for place in range(len(groups.counts))]
            for place, mask in enumerate(groups.masks[num_rows]):
                self._reads.name_group(mask, groups.counts, place)
        return groups.masks[num_rows]

    def _joined(self, pieces: Any) -> torch.Tensor | None:
        """The pieces of all groups in their order, as rows that are written where their masks are true."""
        if not all(isinstance(piece, torch.Tensor) and piece.dim() for piece in pieces):
            return None
        if len({(piece.dtype, piece.shape[1:]) for piece in pieces}) != 1:
            return None
        for groups in reversed(self._groups):
            for num_rows, masks in groups.masks.items():
                written = self._by_mask(pieces, masks, groups.numbers)
                if written:
                    result = pieces[0].new_zeros((num_rows, *pieces[0].shape[1:]))
                    for mask, piece in written:
                        result[mask] = piece
                    return result
        return None

    def _by_mask(
        self, pieces: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], numbers: Sequence[int]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each piece with the mask of its group; none if they are not all groups in their order, but for empty ones."""
        remaining, pairs = list(pieces), []
        for mask, number in zip(masks, numbers):
            is_next = bool(remaining) and remaining[0].shape[0] == number
            if is_next and self._reads.depends_on(remaining[0], mask):
                pairs.append((mask, remaining.pop(0)))
            elif number:
                return []
        return [] if remaining else pairs


_SPLITS = ("split", "split_with_sizes")
_JOINS = ("cat", "concat", "concatenate")


def _groups_of(sizes: Any) -> _Groups | None:
    """The groups of which ``sizes`` are all sizes, in their order."""
    if not isinstance(sizes, Sequence) or not sizes or not all(isinstance(size, _Size) for size in sizes):
        return None
    groups: _Groups = sizes[0].groups
    places = [(size.groups is groups, size.first, size.last) for size in sizes]
    return groups if places == [(True, place, place + 1) for place in range(len(groups.counts))] else None
