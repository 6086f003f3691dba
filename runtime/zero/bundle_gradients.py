"""The gradients of a bundle of parameters: added up over micro-batches, reduced over ranks, handed to the owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from runtime.torch_compat.autograd_engine import gradient_hooks
from runtime.torch_compat.host_state import add_all, is_alone_in_memory
from runtime.zero.flat import FlatLayout, copy_all, stretch
from runtime.zero.group import StateGroup

#: From this ZeRO stage on gradients end as pieces.
_PIECES = 1


class Gradients:
    """Gradients of parameters that have the same dtypes.

    Args:
        at_once: add what has been reduced to the owners' ``grad`` as soon as it is there: another unit uses the same
            parameters, and the sum is to be held once. Not where other groups hold the same pieces: the sum over them
            is of one step alone, and the owners may have the gradients of earlier ones.

    ``add`` takes a whole gradient; ``launch`` starts reducing what has been added, asynchronously; ``finish`` adds the
    reduced to the owners' ``grad``. Of several groups that hold the same pieces each reduces by itself; ``spread``
    starts summing the results of a whole step over them. A parameter that no gradient was added for keeps the ``grad``
    it has: which those are follows from the program, so all ranks agree.
    """

    def __init__(
        self,
        owners: Sequence[nn.Parameter],
        layout: FlatLayout,
        *,
        zero: int,
        group: StateGroup,
        dtype: torch.dtype,
        at_once: bool = False,
    ) -> None:
        self._owners = tuple(owners)
        self._at_once = at_once and group.replicas is None
        self._layout = layout
        self._pieces = zero >= _PIECES
        self._group = group
        self._dtype = dtype
        self._buffer: torch.Tensor | None = None
        self._added: set[int] = set()
        self._running: tuple[Any, set[int]] | None = None
        self._reduced: torch.Tensor | None = None
        #: What is being summed over the groups that hold the same pieces, and what has been.
        self._spreading: Any = None
        self._spread: torch.Tensor | None = None
        #: The whole gradients of the last step, whose memory serves the next if nobody has kept them: memory from the
        #: system is slow at its first touch.
        self._spare: torch.Tensor | None = None
        #: The buffer that was used last, and each parameter's whole gradient in it.
        self._views: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        self._reduced_of: set[int] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes held from one micro-batch to the next."""
        buffers = (self._buffer, self._reduced, self._spread)
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers if buffer is not None)

    def add(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Add the whole gradients of some parameters, by place; without gradients of their own."""
        if not gradients:
            return
        if self._buffer is None:
            self._buffer = self._fresh_buffer()
        repeated = {place: gradients[place] for place in gradients.keys() & self._added}
        fresh = {place: one for place, one in gradients.items() if place not in repeated} if repeated else gradients
        copy_all(*self._pairs(self._buffer, fresh))
        targets, sources = self._pairs(self._buffer, repeated)
        if targets:
            add_all(targets, sources)
        self._added.update(gradients)

    def _fresh_buffer(self) -> torch.Tensor:
        spare, self._spare = self._spare, None
        if spare is not None:
            buffer, views = self._views or (None, ())
            if is_alone_in_memory(spare, besides=len(views) if buffer is spare else 0):
                return spare
        self._views = None
        size = self._layout.row * self._layout.num_ranks if self._pieces else self._layout.total
        return torch.empty(size, dtype=self._dtype, device=self._owners[0].device)

    def launch(self) -> None:
        """Start reducing what has been added."""
        if self._buffer is None:
            return
        self.settle()
        if len(self._added) < len(self._owners):
            for place in range(len(self._owners)):
                if place not in self._added:
                    self._space(self._buffer, place).zero_()
        reduce = self._group.reduce_scatter if self._pieces else self._group.all_reduce
        self._running = reduce(self._buffer), self._added
        self._buffer, self._added = None, set()

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for what is being reduced."""
        if self._running is None:
            return
        (running, added), self._running = self._running, None
        result = self._group.wait(running)
        if self._at_once:
            self._hand_over(result, added)
            self._views = None
            return
        self._reduced = result if self._reduced is None else self._reduced.add_(result)
        self._reduced_of |= added

    def spread(self) -> None:
        """Start summing over the groups that hold the same pieces what this one has reduced, if there are others."""
        self.launch()
        self.settle()
        if self._group.replicas is not None and self._reduced is not None:
            self._settle_spread()
            self._spreading, self._reduced = self._group.replicas.all_reduce(self._reduced), None

    @torch.no_grad()
    def _settle_spread(self) -> None:
        if self._spreading is not None and self._group.replicas is not None:
            result = self._group.replicas.wait(self._spreading)
            self._spread = result if self._spread is None else self._spread.add_(result)
            self._spreading = None

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce what is left, wait, and add everything to the owners' ``grad``."""
        self.launch()
        self.settle()
        if self._group.replicas is not None:
            self.spread()
            self._settle_spread()
        reduced = self._reduced if self._spread is None else self._spread
        if reduced is None:
            return
        self._hand_over(reduced, self._reduced_of)
        self._spare = None if self._pieces else reduced
        self._reduced, self._spread, self._reduced_of = None, None, set()
        if self._views is not None and self._views[0] is not self._spare:
            self._views = None

    def _hand_over(self, reduced: torch.Tensor, places: set[int]) -> None:
        """Add reduced gradients to the owners' ``grad``."""
        if self._pieces:
            totals = self._layout.pieces(reduced, self._owners)
        else:  # Separate views: ``_fresh_buffer`` counts who keeps them.
            totals = [whole.detach() for whole in self._wholes(reduced)]
        for place in sorted(places):
            owner, total = self._owners[place], totals[place].to(self._owners[place].dtype)
            if not owner.requires_grad:
                continue  # Frozen since the plan was made.
            if gradient_hooks(owner):
                torch.autograd.backward(owner, total.clone())
            elif owner.grad is None:
                owner.grad = total
            else:
                owner.grad.add_(total)

    def discard(self) -> None:
        """Forget all that has been added since the last ``finish``."""
        if self._running is not None:
            self._group.wait(self._running[0])
        if self._spreading is not None:
            self._settle_spread()
        self._running = None
        self._buffer, self._added = None, set()
        self._reduced, self._spread, self._reduced_of = None, None, set()

    def _pairs(
        self, buffer: torch.Tensor, gradients: Mapping[int, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if self._pieces:
            return self._layout.scatter_pairs(buffer, gradients)
        wholes = self._wholes(buffer)
        return [wholes[place] for place in gradients], [*gradients.values()]

    def _wholes(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's whole gradient in a buffer."""
        if self._views is None or self._views[0] is not buffer:
            self._views = buffer, self._layout.wholes(buffer)
        return self._views[1]

    def _space(self, buffer: torch.Tensor, place: int) -> torch.Tensor:
        if self._pieces:
            return self._layout.slot_rows(buffer, place)
        slot = self._layout.slots[place]
        return stretch(buffer, slot.start, slot.size)
