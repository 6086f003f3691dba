"""Unequal devices: what a part of a mixed cluster looks like from inside, and the orders that its parts may have.

A pipeline stage whose ranks are all of one kind computes and talks as if the whole cluster were of that kind: its
``view``. Where its ranks are of several kinds all wait for the slowest, as ``CostModel`` has it. Ranks are numbered in
the order of the cluster's device groups, so that the order of the groups is the order of the kinds along an outermost
pipeline axis (``orders``).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from cost_models.cluster import Cluster
from cost_models.cluster_format import IN_ORDER, REORDER, SLOWEST
from cost_models.hardware import Device, DeviceGroup, LinkException, LinkLevel

#: Runs of equal devices up to which all orders are tried; of more, the order is that of the cluster.
MOST_PARTS = 3


@dataclass(frozen=True)
class DeviceKind:
    """Devices that are alike, with the links that they have: ``ranks`` are ranges of ranks, in order."""

    device: Device
    levels: tuple[LinkLevel, ...]
    ranks: tuple[range, ...]

    @property
    def count(self) -> int:
        """Number of these devices."""
        return sum(map(len, self.ranks))


def device_kinds(cluster: Cluster) -> tuple[DeviceKind, ...]:
    """The kinds of a cluster's devices in rank order; devices that differ in their links alone are of two kinds."""
    kinds: list[DeviceKind] = []
    first = 0
    for group in cluster.groups:
        ranks = range(first, first + group.count)
        first = ranks.stop
        levels = group.levels or tuple(_links_of(level, ranks) for level in cluster.levels)
        for index, kind in enumerate(kinds):
            if (kind.device, kind.levels) == (group.device, levels):
                kinds[index] = replace(kind, ranks=(*kind.ranks, ranks))
                break
        else:
            kinds.append(DeviceKind(group.device, levels, (ranks,)))
    return tuple(kinds)


def view(cluster: Cluster, kinds: Sequence[DeviceKind], seen: Collection[int]) -> Cluster:
    """The cluster as a stage sees it whose ranks are of the kinds with the indices ``seen``.

    Of one kind: as if all devices were of it. Of several: all on the cluster's links, each as slow as the slowest.
    """
    devices = [kinds[index] for index in sorted(seen)]
    groups = tuple(DeviceGroup(kind.device, 1) for kind in devices[1:])
    groups = (DeviceGroup(devices[0].device, cluster.num_devices - len(groups)), *groups)
    levels = devices[0].levels if len(devices) == 1 else cluster.levels
    return replace(cluster, groups=groups, levels=levels, unequal=SLOWEST)


def kinds_of_stages(kinds: Sequence[DeviceKind], *, num_stages: int, stride: int) -> tuple[frozenset[int], ...]:
    """By pipeline rank, the indices of the kinds that its ranks are of; pipeline neighbours lie ``stride`` apart."""
    seen: list[set[int]] = [set() for _ in range(num_stages)]
    for index, kind in enumerate(kinds):
        for ranks in kind.ranks:
            for block in range(ranks.start // stride, (ranks.stop - 1) // stride + 1):
                seen[block % num_stages].add(index)
    return tuple(map(frozenset, seen))


def orders(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with its runs of equal devices in every order, its own first; only that if it is ``"in-order"``, has
    more than ``MOST_PARTS`` runs, or a run that is not whole groups of the inner levels."""
    yield cluster
    parts = _parts(cluster)
    inner = [level.group_size for level in cluster.levels[:-1]]
    if cluster.unequal != REORDER or not 1 < len(parts) <= MOST_PARTS or not cluster.has_unequal_devices:
        return
    if any(len(ranks) % size for _, ranks in parts for size in inner) or cluster.levels[-1].exceptions:
        return
    seen = [(cluster.groups, cluster.levels)]
    for permuted in itertools.permutations(parts):
        groups = tuple(group for part, _ in permuted for group in part)
        levels = tuple(_permuted(level, [ranks for _, ranks in permuted]) for level in cluster.levels)
        if (groups, levels) not in seen:
            seen.append((groups, levels))
            yield replace(cluster, groups=groups, levels=levels)


def in_order(cluster: Cluster) -> Cluster:
    """The cluster with ranks on the devices that they have, as of processes that run."""
    return replace(cluster, unequal=IN_ORDER) if cluster.unequal == REORDER and len(cluster.kinds) > 1 else cluster


def refuse_unequal(cluster: Cluster, what: str) -> None:
    """Raise ValueError for ``what`` (a sentence's subject) that reads all devices as alike, if they are not."""
    if cluster.has_unequal_devices:
        raise ValueError(
            f"{what} is for equal devices, and those of {cluster.name!r} are unequal: count all as the slowest "
            '(unequal = "slowest" in the cluster file, --unequal slowest)'
        )


def _parts(cluster: Cluster) -> list[tuple[tuple[DeviceGroup, ...], range]]:
    """Runs of groups of equal devices and links, and their ranks."""
    parts: list[tuple[tuple[DeviceGroup, ...], range]] = []
    first = 0
    for _, run in itertools.groupby(cluster.groups, key=lambda group: (group.device.name, group.levels)):
        groups = tuple(run)
        count = sum(group.count for group in groups)
        parts.append((groups, range(first, first + count)))
        first += count
    return parts


def _permuted(level: LinkLevel, parts: Sequence[range]) -> LinkLevel:
    """The level with its exceptions where their groups come to lie if ``parts`` are the old ranks in the new order."""
    new_group: dict[int, int] = {}
    for position, rank in enumerate(itertools.chain.from_iterable(parts)):
        new_group.setdefault(rank // level.group_size, position // level.group_size)
    exceptions = sorted(
        (LinkException(new_group[each.group], each.latency, each.bandwidth) for each in level.exceptions),
        key=lambda each: each.group,
    )
    return replace(level, exceptions=tuple(exceptions))


def _links_of(level: LinkLevel, ranks: range) -> LinkLevel:
    """The level with the slowest of the links that ``ranks`` have, for all."""
    groups = range(ranks.start // level.group_size, (ranks.stop - 1) // level.group_size + 1)
    links = [(each.latency, each.bandwidth) for each in level.exceptions if each.group in groups]
    if len(links) < len(groups):
        links.append((level.latency, level.bandwidth))
    latency, bandwidth = max(each for each, _ in links), min(each for _, each in links)
    return replace(level, latency=latency, bandwidth=bandwidth, exceptions=())
