"""Several tensors in one flat buffer, so that one collective moves them all.

Two layouts, both the same on every rank:

* *rows*: ``[num_ranks, row]``; row r holds rank r's pieces one after the other, each at the place of a full piece.
  What an all-gather of the ranks' rows gives, and what a reduce-scatter takes.
* *whole*: ``[total]``; whole tensors one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from runtime.torch_compat.host_state import copy_into_all
from runtime.zero.flat_places import FlatPlaces, Slot


class FlatLayout(FlatPlaces):
    """Tensors at their places in flat buffers; see the module for the two layouts."""

    def wholes(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Whole tensors as views of a buffer of ``total`` elements."""
        if self.has_plain_sizes:
            return [flat[slot.start : slot.start + slot.size].view(slot.shape) for slot in self.slots]
        return [stretch(flat, slot.start, slot.size).view(slot.shape) for slot in self.slots]

    def pieces(self, row: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One rank's pieces as views of its row; ``like`` gives their shapes."""
        if self.has_plain_sizes:
            return [
                row[slot.row_start : slot.row_start + piece.numel()].view(piece.shape)
                for slot, piece in zip(self.slots, like)
            ]
        return [stretch(row, slot.row_start, piece.numel()).view(piece.shape) for slot, piece in zip(self.slots, like)]

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
        return stretch(rows.view(self.num_ranks, self.row), slot.row_start, slot.row_size, dim=1)

    def _pairs(self, rows: torch.Tensor, slot: Slot, whole: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if self.has_plain_sizes:
            block = rows[:, slot.row_start : slot.row_start + slot.row_size]
        else:
            block = stretch(rows, slot.row_start, slot.row_size, dim=1)
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
        if not isinstance(size, int):
            return self._pairs_by_rank(block, slot, whole)
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

    def _pairs_by_rank(
        self, block: torch.Tensor, slot: Slot, whole: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The same of virtual ranks that hold parts of unequal length, whose sizes cannot be compared."""
        size, inner = slot.shape[0], slot.shape[1:]
        pairs = []
        for rank in range(self.num_ranks):
            offset = torch.sym_min(rank * slot.length, size)
            length = torch.sym_min(slot.length, size - offset)
            own = stretch(block[rank], 0, length * math.prod(inner)).view(length, *inner)
            pairs.append((own, stretch(whole, offset, length)))
        return pairs


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy every source into its target, with a change of dtype where they differ."""
    if targets:
        copy_into_all(targets, sources)


def stretch(tensor: torch.Tensor, start: int, length: int, dim: int = 0) -> torch.Tensor:
    """``tensor.narrow``, for a length too that differs between virtual ranks and so cannot be compared with sizes."""
    if isinstance(length, int):
        return tensor.narrow(dim, start, length)
    entries: torch.Tensor = torch.ops.aten.slice.Tensor(tensor, dim, start, start + length)
    return entries
