"""The working weights of a bundle of parameters: cast and gathered from what the ranks own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from runtime.zero.flat import FlatLayout, copy_all
from runtime.zero.flat_places import FlatTensor
from runtime.zero.group import StateGroup
from runtime.zero.state_pieces import piece

#: From this ZeRO stage on a rank owns a piece of each parameter; from the second on whole weights are not kept.
_PIECES, _GATHERED_PER_USE = 1, 3


class Gathered:
    """Whole weights in one flat buffer."""

    def __init__(self, flat: torch.Tensor, layout: FlatLayout) -> None:
        self.flat = flat
        self._layout = layout
        self._wholes: list[torch.Tensor] | None = None

    def wholes(self) -> list[torch.Tensor]:
        """Each weight as a view, the same at every call: to make them takes as long as to copy small weights."""
        if self._wholes is None:
            self._wholes = self._layout.wholes(self.flat)
        return self._wholes


class WorkingWeights:
    """Working weights of parameters that have the same dtypes.

    Stages 0 to 2 keep them; they are made again from the owners after ``stale``. Stage 3 makes them for every use.

    Args:
        owners: what this rank owns of each.
        shapes: of the working weights.
    """

    def __init__(
        self,
        owners: Sequence[nn.Parameter],
        tensors: Sequence[FlatTensor | tuple[int, ...]],
        *,
        zero: int,
        group: StateGroup,
        compute: torch.dtype,
    ) -> None:
        self.owners = tuple(owners)
        self.layout = FlatLayout(tensors, group.size if zero >= _PIECES else 1)
        self._group = group
        self._compute = compute
        self._pieces = zero >= _PIECES
        self._per_use = zero >= _GATHERED_PER_USE
        self._kept: Gathered | None = None
        #: Owners that lie in the kept weights, and where.
        self._inside: list[nn.Parameter] = []
        self._places: list[int] = []
        self._fresh = False
        self._running: Any = None

    @property
    def as_owned(self) -> bool:
        """Whether the owners themselves are the working weights."""
        return not self._pieces and all(owner.dtype == self._compute for owner in self.owners)

    @property
    def bytes_of_each(self) -> list[int]:
        """Bytes of each whole working weight."""
        return [slot.size * self._compute.itemsize for slot in self.layout.slots]

    def stale(self) -> None:
        """The owners have changed."""
        self._fresh = False
        self.drop_prefetched()

    def drop_prefetched(self) -> None:
        """Forget weights that were gathered ahead of a use that did not come."""
        if self._running is not None:
            self._group.wait(self._running)
            self._running = None

    def prefetch(self) -> None:
        """Start gathering, unless it has started."""
        if self._pieces and self._running is None and (self._per_use or not self._fresh):
            owners = [owner.detach() for owner in self.owners]
            row = torch.empty(self.layout.row, dtype=self._compute, device=owners[0].device)
            copy_all(self.layout.pieces(row, owners), owners)
            self._running = self._group.all_gather(row)

    def gather(self) -> Gathered:
        """Whole weights, of its own for every call."""
        return self._fill(self._empty())

    def kept_tensors(self, *, are_saved: bool = False) -> list[torch.Tensor]:
        """Whole weights that live on (stages 0 to 2): those of the last call unless the owners have changed.

        Args:
            are_saved: a backward pass that is still to come may read them: they are written only where they differ, so
                that autograd complains of a change and of nothing else.
        """
        if self.as_owned:
            return [owner.detach() for owner in self.owners]
        if self._kept is None or [*map(_ADDRESS, self._inside)] != self._places:
            # Where an owner has been given other memory (``.data = …``), what it was before is someone else's now.
            self._kept, self._fresh = self._fill(self._empty()), True
            self._share_storage(self._kept)
        elif not self._fresh:
            self._fill(self._kept, unless_equal=are_saved)
            self._fresh = True
        return self._kept.wholes()

    def _empty(self) -> Gathered:
        owner = self.owners[0]
        return Gathered(torch.empty(self.layout.total, dtype=self._compute, device=owner.device), self.layout)

    def _fill(self, gathered: Gathered, *, unless_equal: bool = False) -> Gathered:
        with torch.no_grad():
            targets, sources = self._parts(gathered)
            if not unless_equal or not all(map(torch.equal, targets, sources)):
                copy_all(targets, sources)
        return gathered

    def _parts(self, gathered: Gathered) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Parts of the whole weights, and what the owners have for each."""
        if not self._pieces:
            return gathered.wholes(), [owner.detach() for owner in self.owners]
        self.prefetch()
        rows = self._group.wait(self._running)
        self._running = None
        return self.layout.gather_pairs(rows, gathered.flat)

    def _share_storage(self, gathered: Gathered) -> None:
        """Let owners be the part of the kept weights that they equal, where that is contiguous memory."""
        self._inside = []
        for owner, whole, slot in zip(self.owners, gathered.wholes(), self.layout.slots):
            plain = type(owner.data) is torch.Tensor
            if plain and self._pieces and slot.dim == 0 and owner.dtype == self._compute and _alone(owner):
                owner.data = piece(whole, self._group.size, self._group.rank, slot.dim)
                self._inside.append(owner)
        self._places = [*map(_ADDRESS, self._inside)]


_ADDRESS = torch.Tensor.data_ptr


def _alone(owner: nn.Parameter) -> bool:
    """Whether nothing else lies in the owner's storage."""
    return owner.untyped_storage().nbytes() <= owner.numel() * owner.element_size()
