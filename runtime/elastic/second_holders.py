"""Copies of the state of training on the host: a rank's own shard, and of another rank what nobody else holds.

What data ranks hold alike has several holders as it is; all else is sent to a second one, on another node if there are
several: the next rank that is. A copy counts once all ranks have theirs, and only then the last one is dropped.
"""

from __future__ import annotations

import copy
import hashlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from runtime.agreement.ranks_together import Ranks
from runtime.checkpoint.optimizer_state import merged_groups
from runtime.checkpoint.rectangles_of_tensors import Piece
from runtime.migration.state_entries import HeldPiece, RankState, StateEntry
from runtime.migration.tensor_regions import without_all
from runtime.module.meeting import SavedState

#: Tensors begin at multiples of so many bytes in a message.
_ALIGNMENT = 16

Held = Mapping[StateEntry, HeldPiece]


@dataclass(frozen=True)
class StateCopy:
    """The state after ``step`` steps, as far as this rank has it.

    Attributes:
        own_bytes, second_bytes: of this rank's own shard, and of what it holds of others'.
    """

    step: int
    saved: SavedState
    own_bytes: int
    second_bytes: int


class SecondHolders:
    """Makes copies of what ``ranks``, those at work under a plan, hold."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._rank = 0 if ranks.group is None else dist.get_rank(ranks.group)
        self._nodes = ranks.gathered(socket.gethostname())
        self._digests: list[str] = []
        self._held: list[Held] = []

    def copy(self, saved: SavedState, step: int) -> StateCopy:
        """A copy that this rank and its second holder have; ``settle`` says when all ranks have theirs.

        Raises:
            RuntimeError: if another rank is gone.
        """
        pieces = {entry: piece for entry, (piece,) in saved.rank.pieces.items() if entry.kind != "gradient"}
        held = {entry: HeldPiece.of(piece) for entry, piece in pieces.items()}
        own = {entry: Piece(_on_host(piece.tensor), piece.shape, piece.offsets) for entry, piece in pieces.items()}
        self._agree_on(held)
        groups = [merged_groups(parts) for parts in zip(*self._ranks.gathered(copy.deepcopy(saved.rank.groups) or []))]
        second = dict(self._exchange(own))
        together: dict[StateEntry, tuple[Piece, ...]] = {entry: (piece,) for entry, piece in own.items()}
        for (entry, _), piece in second.items():
            together[entry] = (*together.get(entry, ()), piece)
        of_all = frozenset(entry for rank_held in self._held for entry in rank_held)
        rank_state = RankState(together, groups, is_live=False, of_all=of_all)
        sizes = [sum(one.tensor.nbytes for one in some) for some in (own.values(), second.values())]
        return StateCopy(step, replace(saved, rank=rank_state), *sizes)

    def settle(self, seen: int) -> int:
        """Wait until all ranks have their copies; the largest number that any of them has ``seen``."""
        return max(self._ranks.gathered(seen))

    def _agree_on(self, held: Held) -> None:
        """Learn what all ranks hold, if that has changed anywhere."""
        digests = self._ranks.gathered(hashlib.sha256(repr(sorted(held.items())).encode()).hexdigest())
        if digests != self._digests:
            self._held, self._digests = self._ranks.gathered(dict(held)), digests

    def _sent_by(self, rank: int) -> list[tuple[StateEntry, HeldPiece]]:
        """What a rank holds that has no second holder: on another node, if there are several."""
        node, several = self._nodes[rank], len(set(self._nodes)) > 1
        sent = []
        for entry, piece in self._held[rank].items():
            others = [
                other[entry].region
                for number, other in enumerate(self._held)
                if number != rank and entry in other and not (several and self._nodes[number] == node)
            ]
            if without_all([piece.region], others):
                sent.append((entry, piece))
        return sent

    def _exchange(self, own: Mapping[StateEntry, Piece]) -> Iterator[tuple[tuple[StateEntry, int], Piece]]:
        """Send what has no second holder, and receive what this rank is to hold: by entry and by whose it is."""
        operations, arriving = [], []
        group = self._ranks.group
        if group is None:
            return
        for rank in range(len(self._held)):
            holder, sent = second_holder(rank, self._nodes), self._sent_by(rank)
            if not sent or self._rank not in (rank, holder):
                continue
            offsets = _offsets([piece for _, piece in sent])
            message = torch.empty(offsets[-1], dtype=torch.uint8)
            if self._rank == rank:
                for (entry, piece), begin in zip(sent, offsets):
                    _view(message, begin, piece).copy_(own[entry].tensor)
                operations.append(dist.P2POp(dist.isend, message, group=group, group_peer=holder))
            else:
                operations.append(dist.P2POp(dist.irecv, message, group=group, group_peer=rank))
                arriving.append((rank, sent, offsets, message))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        for rank, sent, offsets, message in arriving:
            for (entry, piece), begin in zip(sent, offsets):
                offset = tuple(begin for begin, _ in piece.region)
                yield (entry, rank), Piece(_view(message, begin, piece), piece.shape, offset)


def merged(copies: Sequence[StateCopy]) -> SavedState | None:
    """What this rank has in copies of the same step, made under one plan and under the next; None if there are none."""
    if not copies:
        return None
    pieces: dict[StateEntry, tuple[Piece, ...]] = {}
    for one in copies:
        for entry, some in one.saved.rank.pieces.items():
            pieces[entry] = (*pieces.get(entry, ()), *some)
    newest = copies[-1].saved
    return replace(newest, rank=replace(newest.rank, pieces=pieces))


def without_tensors(saved: SavedState) -> SavedState:
    """What is left where a part of the state has no holder any more."""
    return replace(saved, rank=replace(saved.rank, pieces={}, of_all=frozenset()))


def second_holder(rank: int, nodes: Sequence[str]) -> int | None:
    """The next rank on another node, or the next one; None for a rank alone."""
    others = [(rank + distance) % len(nodes) for distance in range(1, len(nodes))]
    elsewhere = [other for other in others if nodes[other] != nodes[rank]]
    return next(iter(elsewhere or others), None)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host; numbers stay where they are, as optimizers want them there."""
    return tensor.detach().clone() if tensor.ndim == 0 else tensor.detach().to("cpu", copy=True)


def _offsets(pieces: Sequence[HeldPiece]) -> list[int]:
    """Where each piece begins in a message of all, and where that ends, in bytes."""
    offsets = [0]
    for piece in pieces:
        num_bytes = torch.Size(piece.sizes).numel() * piece.dtype.itemsize
        offsets.append(offsets[-1] + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def _view(message: torch.Tensor, begin: int, piece: HeldPiece) -> torch.Tensor:
    """The part of a message that is a piece, as a tensor."""
    num_bytes = torch.Size(piece.sizes).numel() * piece.dtype.itemsize
    return message[begin : begin + num_bytes].view(piece.dtype).view(piece.sizes)
