"""The parts that a cluster is made of: devices, and the levels of links between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cost_models.dtypes import RATE_STAND_IN, TFLOAT32, item_size
from cost_models.efficiency import ANY_ROWS, FULL, TILED_KINDS, Curve, Efficiency, MatmulShape, of_kind
from cost_models.fields import Positive, Seconds
from cost_models.short_text import ShortRepr


@dataclass(frozen=True, repr=False)
class Device(ShortRepr):
    """One accelerator (or one CPU process).

    Attributes:
        name: what it is called in reports.
        flops: dense peak, operations per second, by dtype (``"tfloat32"`` is float32 on tensor cores); "float32"
            must be there, it stands in for dtypes that are not.
        memory_bytes: memory that the driver reports.
        memory_bandwidth: bytes per second.
        launch_overhead: seconds that the shortest operation takes.
        reserved_bytes: of the memory, what tensors cannot have: the driver's context, libraries, a display.
        overlap_slowdown: seconds that computing loses for each second of communication that runs beside it: both need
            processors and memory bandwidth.
        host_seconds: seconds that the host needs to launch one operator or collective, during which the device may run
            what was launched before; 0: not measured, and not priced.
        efficiency: by kind of work, what share of the peaks is reached; full peaks for kinds that are not in it.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    launch_overhead: float
    reserved_bytes: float = 0.0
    overlap_slowdown: float = 0.0
    host_seconds: float = 0.0
    efficiency: Mapping[str, Efficiency] = field(default_factory=dict)

    @property
    def usable_bytes(self) -> float:
        """Memory that tensors can use."""
        return self.memory_bytes - self.reserved_bytes

    def peak_flops(self, dtype: str) -> float:
        """Operations per second for ``dtype``, of the nearest dtype listed if it is not."""
        while dtype not in self.flops:
            dtype = RATE_STAND_IN.get(dtype, "float32")
        return self.flops[dtype]

    def seconds(
        self,
        *,
        flops: float,
        num_bytes: float,
        dtype: str,
        kind: str,
        shape: MatmulShape | None = None,
        row_step: int = ANY_ROWS,
    ) -> float:
        """Seconds of one operator: the longest of arithmetic, memory traffic (a roofline) and the launch.

        ``row_step``: a power of two that divides the elements of all rows that it reads or writes.

        Raises:
            ValueError: if the kind is not known.
        """
        efficiency = of_kind(self.efficiency, kind)
        size = item_size("float32" if dtype == TFLOAT32 else dtype)
        is_tf32 = dtype == "float32" and self.flops.get(dtype) == self.flops.get(TFLOAT32)  # see cost_models.live
        peak = self.peak_flops(dtype) * efficiency.rate_of_rows(row_step, TFLOAT32 if is_tf32 else dtype)
        if efficiency.kernel is not None and shape is not None and flops:
            seconds = efficiency.kernel.seconds(
                shape,
                flops=flops,
                num_bytes=num_bytes,
                item_size=size,
                peak=peak,
                bandwidth=self.memory_bandwidth,
            )
            return max(seconds, self.launch_overhead)
        arithmetic = traffic = 0.0
        if flops:
            arithmetic = efficiency.busy_flops(flops, shape=shape if kind in TILED_KINDS else None)
        if num_bytes:
            traffic = efficiency.busy_bytes(num_bytes)
        return max(arithmetic / peak, traffic / self.memory_bandwidth, self.launch_overhead)


@dataclass(frozen=True, repr=False)
class DeviceGroup(ShortRepr):
    """``count`` devices of one kind, consecutive in rank order.

    ``levels``: the cluster's levels with the links that these devices have among themselves, where they have better
    ones than the cluster's, which are those of the slowest devices.
    """

    device: Device
    count: int
    levels: tuple[LinkLevel, ...] = ()


@dataclass(frozen=True)
class LinkException:
    """A group of a level whose links differ from the level's own: group ``group``, counted in rank order."""

    group: int
    latency: Seconds
    bandwidth: Positive


@dataclass(frozen=True)
class Protocol:
    """One way to move a collective's bytes over a level: NCCL has one of low latency and one of high bandwidth.

    Attributes:
        name: ``"ll128"``, ``"simple"``, …; levels that a collective crosses together use the same one.
        latency: seconds that a collective takes at least.
        hop_latency: seconds that each of its steps over this level adds.
        bandwidth_efficiency: share of the link's bandwidth that is reached, by the collective's bytes.
        collectives: that run by it; none named: all.
        own_bandwidth: bytes per second at which a rank deals with what it sends to nobody: its own part of what is
            gathered, scattered or exchanged, all of what is reduced.
        ramp: of x seconds in which bytes move, ramp·√x are added: pipelines of chunks fill and empty (√seconds).
        least_group: ranks from which on it is used.
        in_network: switches add up, so that a rank sends what is reduced once and receives it once.
        algorithms: names of ``cost_models.collectives.ALGORITHMS`` that the software has; none named: all. Of levels
            that a collective crosses together the innermost one's count.
    """

    name: str
    latency: float
    hop_latency: float = 0.0
    bandwidth_efficiency: Curve = FULL
    collectives: tuple[str, ...] = ()
    own_bandwidth: float = math.inf
    ramp: float = 0.0
    least_group: int = 2
    in_network: bool = False
    algorithms: tuple[str, ...] = ()

    def serves(self, collective: str, group_size: int) -> bool:
        """Whether a collective of so many ranks can run by it."""
        return group_size >= self.least_group and (not self.collectives or collective in self.collectives)


@dataclass(frozen=True)
class Wire:
    """One link of a level that is wired link by link: ``a`` and ``b`` are parts (numbers) or switches (names).

    ``bandwidth`` is bytes per second in each direction, ``latency`` seconds.
    """

    a: int | str
    b: int | str
    bandwidth: float
    latency: float


#: The ways to wire a level's links, see ``LinkLevel.wiring``.
WIRINGS = ("switch", "uplink", "rail", "ring", "line", "links")


@dataclass(frozen=True, repr=False)
class LinkLevel(ShortRepr):
    """The links that join devices into groups of ``group_size`` consecutive ranks (a node, a rack, everything).

    A group of the level before is a *part* of this level's groups (of the innermost level: a device).

    Attributes:
        name: ``"nvlink"``, ``"network"``, …
        group_size: devices of one group, those of the levels inside included.
        latency: α, seconds before the first byte of a message arrives.
        bandwidth: β, bytes per second of one link, one direction.
        exceptions: groups whose links differ.
        shared_by: how many consecutive devices share one link to this level (8: a host of 8 with one network card).
        protocols: of which the fastest is used; none given: one, of this ``latency``, the same for any number of
            steps, at full bandwidth.
        wiring: ``"switch"``: links from the devices to a switch that reaches all of the group. ``"uplink"``: one link
            from each switch of the level inside to a switch above (fat trees). ``"rail"``: a switch for each position
            in a part, to which the devices at that position are linked. ``"ring"``, ``"line"``: each device is linked
            to those at its position in the parts before and after (a torus has a ring for each dimension).
            ``"links"``: the same between the parts that ``wires`` names.
        wires: the links of wiring ``"links"``.
    """

    name: str
    group_size: int
    latency: float
    bandwidth: float
    exceptions: tuple[LinkException, ...] = ()
    shared_by: int = 1
    protocols: tuple[Protocol, ...] = ()
    wiring: str = "switch"
    wires: tuple[Wire, ...] = ()

    @property
    def is_direct(self) -> bool:
        """Whether devices pass messages on for each other, as in a torus, and not switches alone."""
        return self.wiring in ("ring", "line", "links")

    @property
    def is_aligned(self) -> bool:
        """Whether its links reach the same position of other parts only: others are reached over the levels inside."""
        return self.is_direct or self.wiring == "rail"

    def with_parts(self, parts: int, *, of: int) -> LinkLevel:
        """The level where only the first ``parts`` parts of ``of`` are used: rings open, wires lead past the others."""
        if parts == of or not self.is_direct:
            return self

        def node(end: int | str) -> int | str:
            return end if isinstance(end, str) or end < parts else f"unused {end}"

        wires = tuple(replace(wire, a=node(wire.a), b=node(wire.b)) for wire in self.wires)
        return replace(self, wires=wires, wiring="line" if self.wiring == "ring" else self.wiring)

    def group_link(self, group: int) -> tuple[float, float]:
        """(latency, bandwidth) inside group number ``group`` of this level."""
        for exception in self.exceptions:
            if exception.group == group:
                return exception.latency, exception.bandwidth
        return self.latency, self.bandwidth

    def slowest_link(self, num_devices: int) -> tuple[float, float]:
        """(latency, bandwidth) no better than any group's: all groups of an axis work at once, the slowest decides."""
        differing: list[LinkException | Wire] = [*self.exceptions, *self.wires]
        links = [(link.latency, link.bandwidth) for link in differing]
        if not self.wires and len(links) < num_devices // self.group_size:
            links.append((self.latency, self.bandwidth))
        return max(latency for latency, _ in links), min(bandwidth for _, bandwidth in links)


def slowest_device(groups: Sequence[DeviceGroup]) -> Device:
    """The device that has the worst of each figure: every rank does the same work, so the slowest sets the pace.

    Of different devices it has no efficiency curves: ``CostModel`` asks each device for its own time.
    """
    devices = [group.device for group in groups]
    if all(device == devices[0] for device in devices):
        return devices[0]
    dtypes = dict.fromkeys(dtype for device in devices for dtype in device.flops)
    return Device(
        name=" + ".join(dict.fromkeys(device.name for device in devices)),
        flops={dtype: min(device.peak_flops(dtype) for device in devices) for dtype in dtypes},
        memory_bytes=min(device.usable_bytes for device in devices),
        memory_bandwidth=min(device.memory_bandwidth for device in devices),
        launch_overhead=max(device.launch_overhead for device in devices),
        overlap_slowdown=max(device.overlap_slowdown for device in devices),
        host_seconds=max(device.host_seconds for device in devices),
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


def placement(levels: Sequence[LinkLevel], *, stride: int, size: int) -> tuple[tuple[str, int, int], ...]:
    """A key of an axis's prices beside its size: the levels that it crosses, and its position on them.

    Of each level its name, the ``stride``-th devices in one group, and where its links are no switch's of all devices
    the stride.
    """
    return tuple(
        (level.name, level.group_size // stride, 0 if level.wiring == "switch" else stride)
        for level in crossed_levels(levels, stride=stride, size=size)
    )
