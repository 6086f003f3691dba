"""The collectives that are timed: sizes, groups of every level of links, and what makes a call of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

#: What programs call.
_OPERATORS = torch.ops._c10d_functional
#: Bytes of the whole tensor.
SIZES = tuple(2**power for power in range(10, 27))


#: Of groups that only tell how many ranks share a link: large enough to fill it.
FEW_SIZES = tuple(2**power for power in (10, 16, 20, 22, 23, 24))
#: Where groups lie: in one host; a rank of each host, all of them at once or the hosts' first ones alone; everywhere.
HOST, NETWORK, ALONE, ACROSS = "host", "network", "network, one rank a host", "host and network"


@dataclass(frozen=True)
class LinkGroups:
    """Groups of ``size`` ranks, ``stride`` apart, that use the same links; all of them work at once.

    ``is_alone``: of those that lie interleaved only the first one works.
    """

    place: str
    size: int
    stride: int
    is_alone: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the tensors that are timed."""
        return FEW_SIZES if self.is_alone else SIZES

    @property
    def collectives(self) -> tuple[str, ...]:
        """Those that are timed: a message crosses one level, so none is sent over all of them."""
        return tuple(name for name in COLLECTIVES if name != "send_recv" or self.place != ACROSS)

    def members(self, world_size: int) -> list[list[int]]:
        """Ranks of every group that works."""
        block = self.size * self.stride
        return [
            list(range(first + place, first + block, self.stride))
            for first in range(0, world_size, block)
            for place in range(1 if self.is_alone else self.stride)
        ]


def link_groups(world_size: int, per_host: int) -> list[LinkGroups]:
    """Groups of two, four, … and of all ranks of a host; then one rank of each of two, four, … and all hosts.

    Where hosts have several ranks: also one rank of each host while the others rest, and all ranks of all hosts.
    """
    hosts = world_size // per_host
    groups = [LinkGroups(HOST, size, 1) for size in _group_sizes(per_host)]
    if per_host > 1 and hosts > 1:
        groups += [LinkGroups(ALONE, hosts, per_host, is_alone=True), LinkGroups(ACROSS, world_size, 1)]
    return groups + [LinkGroups(NETWORK, size, per_host) for size in _group_sizes(hosts)]


def _group_sizes(most: int) -> list[int]:
    sizes = {size for size in range(2, most + 1) if size & (size - 1) == 0 and most % size == 0}
    return sorted(sizes | ({most} if most > 1 else set()))


def whole_elements(num_bytes: int, ranks: int) -> int:
    """Elements of float32 of at least so many bytes that ``ranks`` ranks can share evenly, and their parts again."""
    return -(-num_bytes // 4 // ranks**2) * ranks**2 or ranks**2


def all_reduce(elements: int, group: Any, device: torch.device) -> Callable[[], Any]:
    tensor = torch.ones(elements, device=device)
    return lambda: _OPERATORS.wait_tensor(_OPERATORS.all_reduce_(tensor, "sum", group.group_name))


def all_gather(elements: int, group: Any, device: torch.device) -> Callable[[], Any]:
    part = _part(elements, group, device)
    return lambda: _OPERATORS.wait_tensor(_OPERATORS.all_gather_into_tensor(part, group.size(), group.group_name))


def reduce_scatter(elements: int, group: Any, device: torch.device) -> Callable[[], Any]:
    whole = torch.ones(elements, device=device)
    return lambda: _OPERATORS.wait_tensor(
        _OPERATORS.reduce_scatter_tensor(whole, "sum", group.size(), group.group_name)
    )


def all_to_all(elements: int, group: Any, device: torch.device) -> Callable[[], Any]:
    sent = _part(elements, group, device)
    pieces = [sent.numel() // group.size()] * group.size()
    return lambda: _OPERATORS.wait_tensor(_OPERATORS.all_to_all_single(sent, pieces, pieces, group.group_name))


def send_recv(elements: int, group: Any, device: torch.device) -> Callable[[], Any]:
    """Every rank sends to the next and receives from the one before."""
    sent, received = torch.ones(elements, device=device), torch.ones(elements, device=device)
    ranks = dist.get_process_group_ranks(group)
    place = ranks.index(dist.get_rank())
    after, before = ranks[(place + 1) % len(ranks)], ranks[place - 1]

    def call() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, after, group),
            dist.P2POp(dist.irecv, received, before, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return call


def relay(elements: int, group: Any, device: torch.device) -> Callable[[], Any]:
    """Every second rank sends to the next, which answers; a rank without a partner rests."""
    sent, received = torch.ones(elements, device=device), torch.ones(elements, device=device)
    ranks = dist.get_process_group_ranks(group)
    place = ranks.index(dist.get_rank())
    is_first, partner = place % 2 == 0, place ^ 1

    def call() -> None:
        if partner >= len(ranks):
            return
        if is_first:
            dist.send(sent, ranks[partner], group=group)
        dist.recv(received, ranks[partner], group=group)
        if not is_first:
            dist.send(sent, ranks[partner], group=group)

    return call


def _part(elements: int, group: Any, device: torch.device) -> torch.Tensor:
    return torch.ones(elements // dist.get_world_size(group), device=device)


#: By the names of ``cost_models.collectives``: (elements of the whole tensor, group, device) → a call.
COLLECTIVES: dict[str, Callable[[int, Any, torch.device], Callable[[], Any]]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "send_recv": send_recv,
}
