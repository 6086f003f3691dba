"""The parts that a cluster is made of: devices, and the levels of links between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cost_models.dtypes import RATE_STAND_IN


@dataclass(frozen=True)
class Device:
    """One accelerator (or one CPU process).

    Attributes:
        name: what it is called in reports.
        flops: dense peak, operations per second, by dtype (``"tfloat32"`` is float32 on tensor cores); "float32"
            must be there, it stands in for dtypes that are not.
        memory_bytes: memory that tensors can use.
        memory_bandwidth: bytes per second.
        launch_overhead: seconds that the shortest operation takes.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    launch_overhead: float

    def peak_flops(self, dtype: str) -> float:
        """Operations per second for ``dtype``, of the nearest dtype listed if it is not."""
        while dtype not in self.flops:
            dtype = RATE_STAND_IN.get(dtype, "float32")
        return self.flops[dtype]


@dataclass(frozen=True)
class DeviceGroup:
    """``count`` devices of one kind, consecutive in rank order."""

    device: Device
    count: int


@dataclass(frozen=True)
class LinkException:
    """A group of a level whose links differ from the level's own: group ``group``, counted in rank order."""

    group: int
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class LinkLevel:
    """The links that join devices into groups of ``group_size`` consecutive ranks (a node, a rack, everything).

    Attributes:
        name: ``"nvlink"``, ``"network"``, …
        group_size: devices of one group, those of the levels inside included.
        latency: α, seconds before the first byte of a collective arrives.
        bandwidth: β, bytes per second that each device sends over this level, one direction.
        exceptions: groups whose links differ.
    """

    name: str
    group_size: int
    latency: float
    bandwidth: float
    exceptions: tuple[LinkException, ...] = ()

    def group_link(self, group: int) -> tuple[float, float]:
        """(latency, bandwidth) inside group number ``group`` of this level."""
        for exception in self.exceptions:
            if exception.group == group:
                return exception.latency, exception.bandwidth
        return self.latency, self.bandwidth

    def slowest_link(self, num_devices: int) -> tuple[float, float]:
        """(latency, bandwidth) no better than any group's: all groups of an axis work at once, the slowest decides."""
        links = [self.group_link(group) for group in range(num_devices // self.group_size)]
        return max(latency for latency, _ in links), min(bandwidth for _, bandwidth in links)


def slowest_device(groups: Sequence[DeviceGroup]) -> Device:
    """The device that has the worst of each figure: every rank does the same work, so the slowest sets the pace."""
    devices = [group.device for group in groups]
    if len(devices) == 1:
        return devices[0]
    dtypes = dict.fromkeys(dtype for device in devices for dtype in device.flops)
    return Device(
        name=" + ".join(dict.fromkeys(device.name for device in devices)),
        flops={dtype: min(device.peak_flops(dtype) for device in devices) for dtype in dtypes},
        memory_bytes=min(device.memory_bytes for device in devices),
        memory_bandwidth=min(device.memory_bandwidth for device in devices),
        launch_overhead=max(device.launch_overhead for device in devices),
    )


def crossed_levels(levels: Sequence[LinkLevel], *, stride: int, size: int) -> tuple[LinkLevel, ...]:
    """The levels whose links a group of ``size`` ranks, ``stride`` apart, uses; none for a group of one.

    On a mesh laid out row-major an axis cuts the ranks into blocks of ``stride × size`` consecutive ones, each with
    ``stride`` interleaved groups. They all lie inside single groups of a level exactly if ``stride × size`` divides
    that level's ``group_size``: the innermost such level is the outermost one that is used. Of the levels inside it
    those are used that hold two members of a group, that is, those with ``group_size > stride``. A level that joins
    nothing (one node in a network) is never used.
    """
    if size == 1:
        return ()
    inside = next(index for index, level in enumerate(levels) if level.group_size % (stride * size) == 0)
    inner_sizes = (1, *(level.group_size for level in levels))
    return tuple(
        level
        for level, inner in zip(levels[: inside + 1], inner_sizes)
        if level.group_size > stride and level.group_size > inner
    )
