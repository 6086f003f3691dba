"""The figures of a cluster that may be wrong: bandwidth of each link level, arithmetic, memory bandwidth and memory.

Where devices are unequal each kind of them has its own figures; a level's links become faster or slower together.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

from cost_models import Cluster
from cost_models.hardware import Device, LinkLevel


@dataclass(frozen=True)
class Figure:
    """An input of the cost model: its name, and the cluster with it at ``factor`` times what it is.

    ``device``: whose figure it is, None if not of a device alone.
    """

    name: str
    at: Callable[[Cluster, float], Cluster]
    device: Device | None = None
    is_memory: bool = False


def figures_of(cluster: Cluster) -> tuple[Figure, ...]:
    """The figures of ``cluster`` that are looked at."""
    sizes = [level.group_size for level in cluster.levels]
    levels = (
        Figure(f"bandwidth of {level.name}", partial(_with_bandwidth, place=place))
        for place, (inner, level) in enumerate(zip((1, *sizes), cluster.levels))
        if level.group_size > inner
    )
    if not cluster.has_unequal_devices:
        return (*levels, *_figures_of_device(cluster.device, "a device", cluster.kinds))
    names = [device.name for device in cluster.kinds]
    of_kinds = (
        _figures_of_device(device, name if names.count(name) == 1 else f"{name} (kind {number})", (device,))
        for number, (device, name) in enumerate(zip(cluster.kinds, names), start=1)
    )
    return (*levels, *itertools.chain.from_iterable(of_kinds))


def figures_named(cluster: Cluster, patterns: Sequence[str]) -> tuple[Figure, ...]:
    """The figures of ``cluster`` whose names one of the patterns matches, in their own order.

    Raises:
        ValueError: for a pattern that matches none; it names all.
    """
    figures = figures_of(cluster)
    for pattern in patterns:
        if not any(fnmatchcase(figure.name, pattern) for figure in figures):
            raise ValueError(
                f"no figure of cluster {cluster.name!r} is named {pattern!r}: expected one of, or a pattern of, "
                f"{', '.join(figure.name for figure in figures)}"
            )
    return tuple(figure for figure in figures if any(fnmatchcase(figure.name, pattern) for pattern in patterns))


def _figures_of_device(device: Device, name: str, kinds: Collection[Device]) -> Iterator[Figure]:
    """The figures that the devices of these kinds have; ``device``: what they count as."""
    changed = partial(_with_devices, kinds=kinds)
    yield Figure(f"arithmetic of {name}", partial(changed, change=_faster), device)
    yield Figure(f"memory bandwidth of {name}", partial(changed, change=_wider), device)
    yield Figure(f"memory of {name}", partial(changed, change=_larger), device, is_memory=True)


def _with_devices(
    cluster: Cluster, factor: float, *, change: Callable[[Device, float], Device], kinds: Collection[Device]
) -> Cluster:
    groups = (
        dataclasses.replace(group, device=change(group.device, factor)) if group.device in kinds else group
        for group in cluster.groups
    )
    return dataclasses.replace(cluster, groups=tuple(groups))


def _faster(device: Device, factor: float) -> Device:
    return dataclasses.replace(device, flops={dtype: factor * rate for dtype, rate in device.flops.items()})


def _wider(device: Device, factor: float) -> Device:
    return dataclasses.replace(device, memory_bandwidth=factor * device.memory_bandwidth)


def _larger(device: Device, factor: float) -> Device:
    return dataclasses.replace(device, memory_bytes=device.reserved_bytes + factor * device.usable_bytes)


def _with_bandwidth(cluster: Cluster, factor: float, *, place: int) -> Cluster:
    def changed(level: LinkLevel) -> LinkLevel:
        return dataclasses.replace(
            level,
            bandwidth=factor * level.bandwidth,
            exceptions=tuple(dataclasses.replace(each, bandwidth=factor * each.bandwidth) for each in level.exceptions),
            wires=tuple(dataclasses.replace(wire, bandwidth=factor * wire.bandwidth) for wire in level.wires),
        )

    def all_changed(levels: tuple[LinkLevel, ...]) -> tuple[LinkLevel, ...]:
        return tuple(changed(level) if index == place else level for index, level in enumerate(levels))

    groups = (dataclasses.replace(group, levels=all_changed(group.levels)) for group in cluster.groups)
    return dataclasses.replace(cluster, levels=all_changed(cluster.levels), groups=tuple(groups))
