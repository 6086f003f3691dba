"""Which rank sends which region of which tensor to whom when a state moves between two plans: a pure function.

What a rank holds already does not move; every other element that it needs comes to it once. What no rank of a node
holds crosses into the node once, to one of those that need it there, which passes it on inside. Sources that can give
the same are used in turn, by the bytes that each has sent.

Tensors move in an order in which no rank holds much more than the larger of its two shards: see ``ordered``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.migration.tensor_regions import Region, num_elements, overlap, without_all


class StateLost(ValueError):
    """No rank holds a part of the state any more."""


@dataclass(frozen=True)
class MovingTensor:
    """A tensor of the state: the regions that each rank holds under the old plan, and the one that it needs after it.

    ``item_size`` is in bytes, as it is sent; ``new_item_size`` as it is kept by those who need it (0: the same);
    ``sent_dtype`` is for those who move it.
    """

    name: Hashable
    item_size: int
    holders: Mapping[int, tuple[Region, ...]]
    takers: Mapping[int, Region]
    new_item_size: int = 0
    sent_dtype: Any = None

    def old_bytes(self, rank: int) -> int:
        return sum(map(num_elements, self.holders.get(rank, ()))) * self.item_size

    def new_bytes(self, rank: int) -> int:
        size = self.new_item_size or self.item_size
        return num_elements(self.takers[rank]) * size if rank in self.takers else 0

    def stays(self, rank: int) -> bool:
        """Whether the rank needs just what it holds, as it is."""
        same_type = self.new_item_size in (0, self.item_size)
        return same_type and rank in self.takers and self.holders.get(rank) == (self.takers[rank],)


@dataclass(frozen=True)
class Transfer:
    """A region that ``source`` sends to ``destination``; ``relayed``: once it has received it itself."""

    source: int
    destination: int
    region: Region
    num_bytes: int
    relayed: bool = False


@dataclass(frozen=True)
class TensorTransfers:
    """A tensor, and all that is sent of it."""

    tensor: MovingTensor
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class TransferPlan:
    """All transfers of a migration, in batches that move one after the other.

    Attributes:
        nodes: of every rank, the node that it is on.
        peak_bytes: of every rank, the most that it holds of the state at any time, without message buffers.
        larger_shard_bytes: of every rank, the larger of what it holds before and after.
        largest_tensor_bytes: of the largest region that a rank needs of one tensor.
    """

    batches: tuple[tuple[TensorTransfers, ...], ...]
    nodes: tuple[Hashable, ...]
    peak_bytes: tuple[int, ...] = field(repr=False)
    larger_shard_bytes: tuple[int, ...] = field(repr=False)
    largest_tensor_bytes: int

    @property
    def transfers(self) -> Iterator[Transfer]:
        return (transfer for batch in self.batches for moved in batch for transfer in moved.transfers)

    @property
    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        """Bytes by (source, destination)."""
        counts: Counter[tuple[int, int]] = Counter()
        for transfer in self.transfers:
            counts[transfer.source, transfer.destination] += transfer.num_bytes
        return dict(sorted(counts.items()))

    @property
    def num_bytes(self) -> int:
        """Bytes that any rank sends."""
        return sum(transfer.num_bytes for transfer in self.transfers)

    @property
    def bytes_between_nodes(self) -> int:
        """Bytes that cross from one node into another."""
        return sum(
            transfer.num_bytes
            for transfer in self.transfers
            if self.nodes[transfer.source] != self.nodes[transfer.destination]
        )


def plan_transfers(tensors: Sequence[MovingTensor], nodes: Sequence[Hashable]) -> TransferPlan:
    """The transfers that bring every tensor from its holders to its takers.

    Args:
        nodes: of every rank, the node that it is on.

    Raises:
        StateLost: if a taker needs what no rank holds.
    """
    sent: Counter[int] = Counter()
    moved = [TensorTransfers(tensor, tuple(_transfers_of(tensor, nodes, sent))) for tensor in tensors]
    old, new, extra = (_bytes_by_rank(tensors, len(nodes), which) for which in ("old", "new", "extra"))
    order = ordered(old, new, extra)
    largest = int(new.max(initial=0))
    batches = list(_batched(order, extra, largest))
    larger = np.maximum(old.sum(axis=0), new.sum(axis=0))
    return TransferPlan(
        tuple(tuple(moved[index] for index in batch) for batch in batches),
        tuple(nodes),
        tuple(int(count) for count in _peaks(batches, old, new, extra)),
        tuple(int(count) for count in larger),
        largest,
    )


def _transfers_of(tensor: MovingTensor, nodes: Sequence[Hashable], sent: Counter[int]) -> Iterator[Transfer]:
    held = [(rank, region) for rank, regions in tensor.holders.items() for region in regions if num_elements(region)]
    # What came into a node from others, by the rank that received it there.
    received: dict[Hashable, list[tuple[int, Region]]] = defaultdict(list)
    for rank, region in tensor.takers.items():
        node = nodes[rank]
        missing = without_all([region], tensor.holders.get(rank, ()))
        if not missing:
            continue
        inside = [(other, part) for other, part in held if nodes[other] == node and other != rank]
        outside = [(other, part) for other, part in held if nodes[other] != node]
        on_the_node = [part for _, part in (*inside, *received[node])]
        arriving = without_all(missing, on_the_node)
        yield from _covering(tensor, rank, missing, inside, sent, relayed=False, complete=False)
        rest = without_all(missing, [part for _, part in inside])
        yield from _covering(tensor, rank, rest, received[node], sent, relayed=True, complete=False)
        yield from _covering(tensor, rank, arriving, outside, sent, relayed=False, complete=True)
        received[node] += [(rank, part) for part in arriving]


def _covering(
    tensor: MovingTensor,
    destination: int,
    regions: Sequence[Region],
    sources: Sequence[tuple[int, Region]],
    sent: Counter[int],
    *,
    relayed: bool,
    complete: bool,
) -> Iterator[Transfer]:
    """Transfers of ``regions`` from those who have them, who has sent least first; all of it, if ``complete``."""
    missing = list(regions)
    for source, held in sorted(sources, key=lambda entry: (sent[entry[0]], entry[0])):
        if not missing:
            return
        for part in (overlap(region, held) for region in missing):
            if part is None:
                continue
            num_bytes = num_elements(part) * tensor.item_size
            sent[source] += num_bytes
            yield Transfer(source, destination, part, num_bytes, relayed)
        missing = without_all(missing, [held])
    if missing and complete:
        raise StateLost(f"no rank holds {missing[0]} of {tensor.name!r}, which rank {destination} needs")


def _bytes_by_rank(tensors: Sequence[MovingTensor], num_ranks: int, which: str) -> np.ndarray:
    """``[tensors, ranks]``: bytes before, after, or that a rank needs beside the old while a tensor moves."""
    counts = np.zeros((len(tensors), num_ranks), dtype=np.int64)
    for index, tensor in enumerate(tensors):
        for rank in tensor.holders if which == "old" else tensor.takers:
            if which == "old":
                counts[index, rank] = tensor.old_bytes(rank)
            elif which == "new" or not tensor.stays(rank):
                counts[index, rank] = tensor.new_bytes(rank)
    return counts


def ordered(old: np.ndarray, new: np.ndarray, extra: np.ndarray) -> list[int]:
    """An order of tensors in which no rank's bytes rise far above the larger of its shards.

    Greedy: next is the tensor after which the rank that is worst off, against the larger of its two shards, is best
    off. Tensors that change all ranks alike are interchangeable, so only one of each kind is looked at.
    """
    larger = np.maximum(old.sum(axis=0), new.sum(axis=0))
    held = old.sum(axis=0) - larger
    kinds: dict[bytes, list[int]] = {}
    for index in range(len(old)):
        kinds.setdefault((new[index] - old[index]).tobytes() + extra[index].tobytes(), []).append(index)
    waiting = list(kinds.values())
    order = []
    while waiting:
        firsts = np.array([kind[0] for kind in waiting])
        after = held + new[firsts] - old[firsts]
        during = (held + extra[firsts]).max(axis=1)
        best = int(np.lexsort((firsts, during, after.max(axis=1)))[0])
        index = waiting[best].pop(0)
        held = held + new[index] - old[index]
        order.append(index)
        if not waiting[best]:
            waiting.pop(best)
    return order


def _batched(order: Sequence[int], extra: np.ndarray, limit: int) -> Iterator[list[int]]:
    """Tensors that move together: what they need on any rank is no more than the largest tensor's."""
    batch: list[int] = []
    for index in order:
        if batch and extra[[*batch, index]].sum(axis=0).max() > limit:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _peaks(batches: Sequence[list[int]], old: np.ndarray, new: np.ndarray, extra: np.ndarray) -> np.ndarray:
    held = old.sum(axis=0)
    peaks = held.copy()
    for batch in batches:
        peaks = np.maximum(peaks, held + extra[batch].sum(axis=0))
        held = held + new[batch].sum(axis=0) - old[batch].sum(axis=0)
    return np.asarray(np.maximum(peaks, held))
