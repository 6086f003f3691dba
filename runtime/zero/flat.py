"""Several tensors in one flat buffer, so that one collective moves them all.

Two layouts, both the same on every rank:

* *rows*: ``[num_ranks, row]``; row r holds rank r's pieces one after the other, each at the place of a full piece.
  What an all-gather of the ranks' rows gives, and what a reduce-scatter takes.
* *whole*: ``[total]``; whole tensors one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from runtime.torch_compat.host_state import copy_into_all
from runtime.zero.state_pieces import piece_dim, piece_shape

#: Tensors start at multiples of this many elements: 16 bytes of a 16-bit dtype, as vectorised kernels like it.
_ALIGNMENT = 8


@dataclass(frozen=True)
class Slot:
    """Where one tensor of ``shape`` lies: its pieces (cut in ``dim``, ``length`` long) and the whole of it."""

    shape: tuple[int, ...]
    dim: int
    length: int
    row_start: int
    row_size: int
    start: int
    size: int


class FlatLayout:
    """Places of tensors of ``shapes`` in flat buffers of ``num_ranks`` ranks; see the module for the two layouts."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.row = self.total = 0
        slots = []
        for shape in shapes:
            piece = piece_shape(shape, num_ranks, 0)
            dim = piece_dim(shape, num_ranks)
            size, piece_size = math.prod(shape), math.prod(piece)
            length = piece[dim] if piece else 1
            slots.append(Slot(shape, dim, length, self.row, piece_size, self.total, size))
            self.row += _aligned(piece_size)
            self.total += _aligned(size)
        self.slots = tuple(slots)

    def wholes(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Whole tensors as views of a buffer of ``total`` elements."""
        return [flat[slot.start : slot.start + slot.size].view(slot.shape) for slot in self.slots]

    def pieces(self, row: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One rank's pieces as views of its row; ``like`` gives their shapes."""
        return [
            row[slot.row_start : slot.row_start + piece.numel()].view(piece.shape)
            for slot, piece in zip(self.slots, like)
        ]

    def gather_pairs(self, rows: torch.Tensor, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Views ``(of the whole buffer, of the rows)`` that hold the same elements, pair by pair."""
        targets, sources = [], []
        rows = rows.view(self.num_ranks, self.row)
        for slot, whole in zip(self.slots, self.wholes(flat)):
            if not slot.shape:
                pairs = [(rows[0, slot.row_start], whole)]
            else:
                pairs = self._pairs(rows, slot, whole)
            for source, target in pairs:
                targets.append(target)
                sources.append(source)
        return targets, sources

    def scatter_pairs(
        self, rows: torch.Tensor, wholes: Mapping[int, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Views ``(of the rows, of the whole tensors)``, pair by pair; ``wholes`` by place."""
        targets, sources = [], []
        rows = rows.view(self.num_ranks, self.row)
        for place, whole in wholes.items():
            slot = self.slots[place]
            if not slot.shape:
                # Every rank owns it, so every rank gets the sum.
                pairs = [(rows[:, slot.row_start], whole.expand(self.num_ranks))]
            else:
                pairs = self._pairs(rows, slot, whole)
            for target, source in pairs:
                targets.append(target)
                sources.append(source)
        return targets, sources

    def slot_rows(self, rows: torch.Tensor, place: int) -> torch.Tensor:
        """All that the rows hold of one tensor, padding included."""
        slot = self.slots[place]
        return rows.view(self.num_ranks, self.row)[:, slot.row_start : slot.row_start + slot.row_size]

    def _pairs(self, rows: torch.Tensor, slot: Slot, whole: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        block = rows[:, slot.row_start : slot.row_start + slot.row_size]
        size = slot.shape[slot.dim]
        if not slot.size:
            return []
        if size == self.num_ranks * slot.length:
            if slot.dim == 0 and whole.is_contiguous():
                return [(block, whole.view(self.num_ranks, slot.row_size))]
            piece = (*slot.shape[: slot.dim], slot.length, *slot.shape[slot.dim + 1 :])
            parts = whole.unflatten(slot.dim, (self.num_ranks, slot.length)).movedim(slot.dim, 0)
            return [(block.view(self.num_ranks, *piece), parts)]
        # Dim 0 in uneven pieces: full ones, then perhaps a shorter one, then empty ones.
        full, rest = divmod(size, slot.length)
        inner = slot.shape[1:]
        pairs = [
            (
                block[:full].view(full, slot.length, *inner),
                whole[: full * slot.length].unflatten(0, (full, slot.length)),
            )
        ]
        if rest:
            short = block[full, : rest * (slot.row_size // slot.length)]
            pairs.append((short.view(rest, *inner), whole[full * slot.length :]))
        return pairs


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy every source into its target, with a change of dtype where they differ."""
    if targets:
        copy_into_all(targets, sources)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
