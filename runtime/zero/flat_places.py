"""Where tensors lie in flat buffers, without the tensors: planning counts by it, ranks move by it (``flat``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class FlatTensor:
    """A tensor that goes into flat buffers.

    Attributes:
        shape: on this rank.
        largest: on the rank that holds most of it, for which there is room on all; None where all hold as much.
        dim: that its pieces are cut in; None for that of ``piece_dim``.
    """

    shape: tuple[int, ...]
    largest: tuple[int, ...] | None = None
    dim: int | None = None

    @property
    def room(self) -> tuple[int, ...]:
        """The shape that there is room for."""
        return self.shape if self.largest is None else self.largest


class FlatPlaces:
    """Places of tensors in flat buffers of ``num_ranks`` ranks, in the two layouts of ``runtime.zero.flat``."""

    def __init__(self, tensors: Sequence[FlatTensor | tuple[int, ...]], num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.row = self.total = 0
        slots = []
        for tensor in (one if isinstance(one, FlatTensor) else FlatTensor(one) for one in tensors):
            dim = piece_dim(tensor.shape, num_ranks) if tensor.dim is None else tensor.dim
            piece = piece_shape(tensor.shape, num_ranks, 0, dim)
            size, piece_size = math.prod(tensor.shape), math.prod(piece)
            length = piece[dim] if piece else 1
            slots.append(Slot(tensor.shape, dim, length, self.row, piece_size, self.total, size))
            self.row += _aligned(math.prod(piece_shape(tensor.room, num_ranks, 0, dim)))
            self.total += _aligned(math.prod(tensor.room))
        self.slots = tuple(slots)
        #: Whether all sizes are plain numbers: virtual ranks may hold parts of unequal length.
        self.has_plain_sizes = all(isinstance(slot.size, int) for slot in slots)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
