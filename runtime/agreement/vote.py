"""Whether all ranks make the same call: one all-reduce of a few integers between processors, which takes no device."""

from __future__ import annotations

import struct

import torch
import torch.distributed as dist

from runtime.torch_compat.dispatcher import without_dispatch_modes


class Vote:
    """A vote of ``group``, which runs in the background until it is counted; all ranks must take part.

    Args:
        number: of the call that this rank makes, as the ranks agreed on it before; None for a call that this rank wants
            to compare in full.
        weight: what must be the same on all ranks as well.
    """

    def __init__(self, group: dist.ProcessGroup | None, number: int | None, weight: float) -> None:
        (bits,) = struct.unpack("q", struct.pack("d", weight + 0.0))  # the bits of -0.0 have no negative
        self._told = torch.tensor([int(number is None), number or 0, -(number or 0), bits, -bits], device="cpu")
        with without_dispatch_modes():
            self._work = dist.all_reduce(self._told, dist.ReduceOp.MAX, group=group, async_op=True)

    def is_unanimous(self) -> bool:
        """Whether all ranks make the call of one number with one weight; waits for the last of them."""
        if self._work is not None:
            self._work.wait()
        unknown, *pairs = self._told.tolist()
        return not unknown and pairs[0] == -pairs[1] and pairs[2] == -pairs[3]
