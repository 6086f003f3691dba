"""The figures of a cluster that may be wrong: bandwidth of each link level, arithmetic, memory bandwidth and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cost_models import Cluster
from cost_models.hardware import Device, LinkLevel


@dataclass(frozen=True)
class Figure:
    """An input of the cost model: its name, and the cluster with it at ``factor`` times what it is."""

    name: str
    at: Callable[[Cluster, float], Cluster]
    is_memory: bool = False


def figures_of(cluster: Cluster) -> tuple[Figure, ...]:
    """The figures of ``cluster`` that are looked at."""
    sizes = [level.group_size for level in cluster.levels]
    levels = (
        Figure(f"bandwidth of {level.name}", partial(_with_bandwidth, place=place))
        for place, (inner, level) in enumerate(zip((1, *sizes), cluster.levels))
        if level.group_size > inner
    )
    return (
        *levels,
        Figure("arithmetic of a device", partial(_with_devices, change=_faster)),
        Figure("memory bandwidth of a device", partial(_with_devices, change=_wider)),
        Figure("memory of a device", partial(_with_devices, change=_larger), is_memory=True),
    )


def _with_devices(cluster: Cluster, factor: float, *, change: Callable[[Device, float], Device]) -> Cluster:
    groups = (dataclasses.replace(group, device=change(group.device, factor)) for group in cluster.groups)
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

    levels = (changed(level) if index == place else level for index, level in enumerate(cluster.levels))
    return dataclasses.replace(cluster, levels=tuple(levels))
