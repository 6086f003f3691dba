"""Rows in groups whose sizes weights decide: ``x.split(counts.tolist())``, computed group by group, joined again.

Rows that are sorted by their expert are cut into one piece for each expert. The sizes that Python reads are made-up
numbers, like those of rows that a mask picks (``picked_rows``), and so are the pieces: the rows of which the group is
the expert. Pieces that are joined in their order are put at the places where their masks are true.
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
        masks: number of rows of all groups together → for each group, which rows are its own.
    """

    def __init__(self, counts: torch.Tensor) -> None:
        self.counts = counts
        self.masks: dict[int, list[torch.Tensor]] = {}


class _Size(int):
    """The number of rows of one of several groups."""

    groups: _Groups
    place: int


class RowGroups:
    """Answers the calls of one trace that read sizes of groups, cut rows into groups, or join these.

    Args:
        reads: knows which values weights decide.
    """

    def __init__(self, reads: ValueReads) -> None:
        self._reads = reads
        self._groups: list[_Groups] = []

    def call(self, function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What ``split`` or ``cat`` gives where it is about such groups; None for other calls."""
        if function in _SPLITS and len(args) > 1 and (args[2:] or (kwargs.get("dim", 0),)) == (0,):
            return self._split(args[0], args[1])
        if function in _JOINS and self._groups and args and (args[1:] or (kwargs.get("dim", 0),)) == (0,):
            return self._joined(args[0])
        return None

    def sizes(self, counts: torch.Tensor) -> list[int] | None:
        """What ``counts.tolist()`` gives if weights decide it; None if they do not."""
        if counts.dim() != 1 or counts.dtype not in (torch.int32, torch.int64) or len(counts) > _MOST_GROUPS:
            return None
        numbers = self._reads.sizes_of_groups(counts)
        if numbers is None:
            return None
        groups = _Groups(counts)
        self._groups.append(groups)
        sizes: list[int] = []
        for place, number in enumerate(numbers):
            size = _Size(number)
            size.groups, size.place = groups, place
            sizes.append(size)
        return sizes

    def _split(self, rows: torch.Tensor, sizes: Any) -> tuple[torch.Tensor, ...] | None:
        groups = _groups_of(sizes)
        if groups is None or not rows.dim():
            return None
        return tuple(rows[mask] for mask in self._masks(groups, rows.shape[0]))

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
                if len(masks) == len(pieces) and all(map(self._reads.depends_on, pieces, masks)):
                    result = pieces[0].new_zeros((num_rows, *pieces[0].shape[1:]))
                    for mask, piece in zip(masks, pieces):
                        result[mask] = piece
                    return result
        return None


_SPLITS = ("split", "split_with_sizes")
_JOINS = ("cat", "concat", "concatenate")


def _groups_of(sizes: Any) -> _Groups | None:
    """The groups of which ``sizes`` are all sizes, in their order."""
    if not isinstance(sizes, Sequence) or not sizes or not all(isinstance(size, _Size) for size in sizes):
        return None
    groups: _Groups = sizes[0].groups
    is_all = len(sizes) == len(groups.counts)
    return groups if is_all and all(s.groups is groups and s.place == place for place, s in enumerate(sizes)) else None
