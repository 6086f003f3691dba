"""Cells of parameters between islands: the mean of all, or the first island's, each sent over the slow link once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from runtime.islands.shared_cells import SharedCell
from runtime.islands.wire_formats import WIRE_FORMATS, WireFormat
from runtime.launch.groups import shared_group

#: This rank's part of a parameter, and where in the parameter it begins.
Part = tuple[torch.Tensor, tuple[int, ...]]
#: Ranks that exchange a cell; the first of them is the source of a broadcast.
Exchanging = tuple[int, ...]
#: Starts an exchange of a buffer among ranks: what to wait for, and what gives the result then.
Start = Callable[[torch.Tensor, Exchanging], tuple[Any, Callable[[], torch.Tensor]]]


class CellExchange:
    """Exchanges cells among the ranks that hold them.

    Args:
        wire_format: what differences are sent as, see ``WIRE_FORMATS``; None for the parameters' own dtype.

    Attributes:
        bytes_sent: by this rank to other islands so far, in means. An all-reduce among n islands counts as a ring's,
            which sends 2·(n − 1)/n of the buffer; other formats are gathered, which sends n − 1 times the buffer.

    Raises:
        ValueError: for a format that there is not.
    """

    def __init__(self, wire_format: str | None = None) -> None:
        if wire_format is not None and wire_format not in WIRE_FORMATS:
            raise ValueError(f"wire_format={wire_format!r}: it must be None or one of {', '.join(WIRE_FORMATS)}")
        self._wire = None if wire_format is None else WIRE_FORMATS[wire_format]
        self.bytes_sent = 0.0

    def average(self, cells: Sequence[SharedCell], parts: Mapping[str, Part]) -> None:
        """Replace every rank's cells by the mean over the islands, the same bits on all ranks."""
        self._run(cells, parts, self._start_mean)

    def take_first(self, cells: Sequence[SharedCell], parts: Mapping[str, Part]) -> None:
        """Replace every rank's cells by those of the first island."""
        self._run(cells, parts, _start_broadcast)

    def _run(self, cells: Sequence[SharedCell], parts: Mapping[str, Part], start: Start) -> None:
        rank = dist.get_rank()
        _exchange(((cell.senders, cell) for cell in cells if rank in cell.senders), parts, start)
        copies = (
            ((sender, *(other for other in holders if other != sender)), cell)
            for cell in cells
            for sender, holders in zip(cell.senders, cell.holders)
            if rank in holders and len(holders) > 1
        )
        _exchange(copies, parts, _start_broadcast)

    def _start_mean(self, buffer: torch.Tensor, ranks: Exchanging) -> tuple[Any, Callable[[], torch.Tensor]]:
        count, group = len(ranks), _group(ranks)
        if self._wire is None or self._wire.name == str(buffer.dtype).removeprefix("torch."):
            self.bytes_sent += 2 * (count - 1) / count * buffer.numel() * buffer.element_size()
            return dist.all_reduce(buffer, group=group, async_op=True), lambda: buffer / count
        wire, sent = self._wire, self._wire.encode(buffer)
        self.bytes_sent += (count - 1) * sent.numel()
        received = sent.new_empty(count * sent.numel())
        work = dist.all_gather_into_tensor(received, sent, group=group, async_op=True)
        return work, lambda: _decoded_mean(received.chunk(count), wire, buffer)


def _decoded_mean(received: Sequence[torch.Tensor], wire: WireFormat, like: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(like)
    for sent in received:
        total += wire.decode(sent, like.numel(), like.dtype)
    return total / len(received)


def _start_broadcast(buffer: torch.Tensor, ranks: Exchanging) -> tuple[Any, Callable[[], torch.Tensor]]:
    return dist.broadcast(buffer, src=ranks[0], group=_group(ranks), async_op=True), lambda: buffer


def _group(ranks: Exchanging) -> dist.ProcessGroup:
    return shared_group("islands", sorted(ranks))


def _exchange(cells: Iterator[tuple[Exchanging, SharedCell]], parts: Mapping[str, Part], start: Start) -> None:
    """Exchange all cells of the same ranks as one buffer, and put the results in their places."""
    batches: dict[tuple[Exchanging, str], list[torch.Tensor]] = {}
    for ranks, cell in cells:
        part, offsets = parts[cell.name]
        batches.setdefault((ranks, str(part.dtype)), []).append(cell.of(part, offsets))
    running = []
    # In the same order on all ranks, since groups that have ranks in common wait for each other on a device.
    for (ranks, _), views in sorted(batches.items(), key=lambda batch: batch[0]):
        running.append((views, start(torch.cat([view.reshape(-1) for view in views]), ranks)))
    for views, (work, result) in running:
        work.wait()
        for view, values in zip(views, result().split([view.numel() for view in views])):
            view.copy_(values.view(view.shape))
