"""Clusters as plain data: the format of TOML files, of the presets, and of ``Cluster.to_dict``.

::

    name = "two-boxes"             # any name

    [device]                       # every device alike; or several [[devices]] with a count each, in rank order
    name = "My GPU"
    memory_bytes = 24e9            # bytes that the driver reports
    reserved_bytes = 0.6e9         # optional: of those, what tensors cannot have (context, libraries, a display)
    memory_bandwidth = 1e12        # bytes/s
    launch_overhead = 4e-6         # seconds
    overlap_slowdown = 0.1         # optional: seconds lost to compute for each second of communication beside it
    host_seconds = 8e-6            # optional: seconds that the host needs to launch one operator or collective
    [device.flops]                 # dense peak per second by dtype; float32 is required and stands in for the rest
    float32 = 40e12
    tfloat32 = 80e12               # float32 with TF32 allowed
    bfloat16 = 160e12

    [device.efficiency.matmul]     # optional: what is reached of the peaks, by kind of work; see below
    flops = [[1e9, 0.4], [1e11, 0.7], [1e12, 0.75]]
    bytes = 0.9
    [device.efficiency.matmul.tiles]
    processors = 84
    depth_overhead = 64
    shapes = [[128, 256, 1.0], [128, 128, 0.9], [64, 64, 0.5]]
    [device.efficiency.elementwise]
    bytes = [[1e6, 0.4], [1e8, 0.9]]

    [host]                         # optional: memory beside the devices', see ``cost_models.host.Host``; one a node
    memory_bytes = 512e9
    memory_bandwidth = 100e9       # bytes/s, shared by the node's devices
    link_bandwidth = 12e9          # bytes/s that a device's link to the host reaches, one direction
    link_shared_by = 2             # optional: devices that share such a link
    level = "pcie"                 # optional: the level whose groups are nodes (default: the innermost)

    [[levels]]                     # links, innermost first
    name = "pcie"
    size = 4                       # how many devices (or groups of the level before) one group joins
    latency = 14e-6                # α, seconds
    bandwidth = 12e9               # β, bytes/s of one link, one direction

    [[levels]]
    name = "network"
    size = 2
    latency = 22e-6
    bandwidth = 3e9
    shared_by = 4                  # optional: devices that share one link, here a box of four with one network card
    protocols = [                  # optional: the fastest is used
        { name = "small", latency = 7e-6, hop_latency = 3e-6, bandwidth_efficiency = 0.25 },
        { name = "large", latency = 9e-6, hop_latency = 14e-6, bandwidth_efficiency = [[1e6, 0.5], [1e8, 0.9]] },
    ]
    [[levels.exceptions]]          # optional: a group of this level (counted in rank order) with slower links
    group = 0
    latency = 22e-6
    bandwidth = 1e9

Ranks are numbered node after node. One device has no links: ``[[devices]]`` with ``count = 1``, and no ``[[levels]]``.
Every number must be positive (latencies, launch_overhead, reserved_bytes, overlap_slowdown and host_seconds may be 0)
and, in a file, finite: only ``Cluster.uniform`` has devices and links that cost nothing. A preset file may also have a
``[match]`` table, see ``cost_models.live``.

**Efficiency.** Kinds are those of ``cost_models.efficiency.KIND_STAND_IN``; a kind without a table takes that of its
stand-in, and reaches the full peak if that has none either. ``flops`` is the share of the peak rate by the number of
operations, ``bytes`` the share of the memory bandwidth by the number of bytes: a number, or points
``[size, efficiency]`` between which it is linear in the logarithm of the size. Points may as well be a table of
measurements, one row a size: time a kernel at several sizes, divide the work by the time and by the peak. They must not
fall with size, nor rise so fast that more work takes less time. ``tiles`` (matmul and convolution) adds what
``cost_models.efficiency.Tiling`` says about shapes, and ``odd_rows`` the share of the rate that is left of products
whose rows have an odd number of elements of two bytes, ``narrow_rows`` of those that have an even number that is no
multiple of 8, ``narrow_tf32_rows`` of those in TF32 that have no multiple of 4. ``kernel`` has the numbers of a kernel
model that prices all calls of known shape by itself: of ``cost_models.matmul_kernel.MatmulKernel`` (matmul,
convolution) or ``cost_models.attention_kernel.AttentionKernel`` (attention, attention_backward).
``efficiency = "h100"`` takes a set of curves that comes with the package (``cost_models/presets/efficiency``).

**Wiring.** A level may say ``wiring = "uplink"``, ``"rail"``, ``"ring"``, ``"line"`` or ``"links"`` in the place of
``"switch"``, see ``cost_models.hardware.LinkLevel``. A level of links has a list of them: ``links = [{ a = 0, b = 1 },
{ a = 1, b = "switch", bandwidth = 6e9, latency = 2e-6 }]``, where numbers are the parts that it joins, in rank order,
texts switches; what a link does not say is the level's. ``[topology]`` writes such levels, see
``cost_models.topology``.

**Unequal devices.** Several ``[[devices]]`` with a ``count`` each may differ. Each may have ``[[devices.levels]]``, the
levels as they are among these devices alone where theirs are faster than ``[[levels]]``, which are then those of the
slowest. ``unequal`` says what they are planned as: ``"reorder"`` (the default: stages of a pipeline may lie on
different devices, in the order that is fastest), ``"in-order"`` (the same with ranks as they stand in the file) or
``"slowest"`` (every device counts as the slowest), see ``cost_models.unequal_devices``.

**Levels.** Without ``protocols`` a collective costs ``latency`` once, whatever the number of steps, and its bytes at
the full bandwidth: the α-β model. A protocol has its own latency, a latency of each step, and the share of the
bandwidth that it reaches by the bytes of the collective. Levels that a collective crosses together use protocols of the
same name. A protocol may be for some ``collectives`` only, and have an ``own_bandwidth``, a ``ramp``, a
``least_group``, ``in_network`` and ``algorithms``, see ``cost_models.hardware.Protocol``.

**Profile.** A file that ``planner profile`` wrote has a table ``[profile]``, see ``cost_models.measured_profile``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from cost_models.collectives import ALGORITHMS
from cost_models.dtypes import ITEM_SIZE, TFLOAT32
from cost_models.efficiency_format import format_curve, format_efficiency, parse_curve, parse_efficiency
from cost_models.fields import (
    Table,
    as_table,
    check_keys,
    get_count,
    get_field,
    get_flag,
    get_number,
    get_seconds,
    get_share,
    get_tables,
    get_text,
    shown,
)
from cost_models.hardware import Device, DeviceGroup, LinkException, LinkLevel, Protocol
from cost_models.host import Host, format_host, parse_host
from cost_models.measured_profile import Profile, format_profile, parse_profile
from cost_models.records import from_plain
from cost_models.topology import expand_topology
from cost_models.wiring import check_wiring, get_wiring, parse_wires

#: More devices than anybody has: a search over their layouts would take hours.
MAX_DEVICES = 1_000_000
_TOP_KEYS = ("name", "device", "devices", "levels", "match", "profile", "unequal", "host")
#: What unequal devices are planned as, the default first.
UNEQUAL = REORDER, IN_ORDER, SLOWEST = ("reorder", "in-order", "slowest")
_DEVICE_KEYS = (
    "name", "flops", "memory_bytes", "memory_bandwidth", "launch_overhead", "reserved_bytes", "overlap_slowdown",
    "host_seconds", "efficiency",
)  # fmt: skip
_LEVEL_KEYS = ("name", "size", "latency", "bandwidth", "shared_by", "protocols", "exceptions", "wiring", "links")
_PROTOCOL_KEYS = tuple(entry.name for entry in fields(Protocol))
#: Algorithms that need neither a torus nor switches that add up.
_ALWAYS_POSSIBLE = ("ring", "tree", "hierarchical", "pairwise", "message")
#: What a cluster prices.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
_RATES = (*ITEM_SIZE, TFLOAT32)


def parse_cluster(
    data: Any,
) -> tuple[str, tuple[DeviceGroup, ...], tuple[LinkLevel, ...], Profile | None, str, Host | None]:
    """Name, devices in rank order, link levels, profile, ``unequal`` and host of a cluster, see the module docstring.

    Raises:
        ValueError: naming the field that is missing, unknown or malformed, and what was expected.
    """
    table = expand_topology(as_table(data, "the cluster"))
    check_keys(table, _TOP_KEYS, "the cluster")
    levels = (_NO_LINK,) if _is_one_device(table) else _parse_levels(get_tables(table, "levels", "the cluster"))
    profile = parse_profile(table["profile"]) if "profile" in table else None
    unequal = table.get("unequal", REORDER)
    if unequal not in UNEQUAL:
        raise ValueError(f"unequal must be one of {', '.join(UNEQUAL)}, got {shown(unequal)}")
    host = parse_host(table["host"], levels) if "host" in table else None
    return get_text(table, "name", "the cluster"), _parse_devices(table, levels), levels, profile, unequal, host


def format_cluster(
    name: str,
    groups: tuple[DeviceGroup, ...],
    levels: tuple[LinkLevel, ...],
    profile: Profile | None = None,
    unequal: str = REORDER,
    host: Host | None = None,
) -> dict[str, Any]:
    """The inverse of ``parse_cluster``: dicts, lists, strings and numbers only."""
    data: dict[str, Any] = {"name": name}
    if len(groups) == 1:
        data["device"] = _format_device(groups[0].device)
    else:
        data["devices"] = [
            {
                "count": group.count,
                **_format_device(group.device),
                **({"levels": _format_levels(group.levels)} if group.levels else {}),
            }
            for group in groups
        ]
    if unequal != REORDER:
        data["unequal"] = unequal
    data["levels"] = _format_levels(levels)
    if host is not None:
        data["host"] = format_host(host)
    if profile is not None:
        data["profile"] = format_profile(profile)
    return data


def _format_device(device: Device) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": device.name,
        "flops": dict(device.flops),
        "memory_bytes": device.memory_bytes,
        "memory_bandwidth": device.memory_bandwidth,
        "launch_overhead": device.launch_overhead,
        "reserved_bytes": device.reserved_bytes,
        "overlap_slowdown": device.overlap_slowdown,
    }
    if device.host_seconds:
        data["host_seconds"] = device.host_seconds
    if device.efficiency:
        data["efficiency"] = format_efficiency(device.efficiency)
    return data


def _format_levels(levels: tuple[LinkLevel, ...]) -> list[dict[str, Any]]:
    inner_sizes = (1, *(level.group_size for level in levels))
    return [_format_level(level, level.group_size // inner) for level, inner in zip(levels, inner_sizes)]


def _format_level(level: LinkLevel, size: int) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": level.name, "size": size, "latency": level.latency, "bandwidth": level.bandwidth,
        "shared_by": level.shared_by,
    }  # fmt: skip
    if level.wiring != "switch":
        data["wiring"] = level.wiring
    if level.wires:
        data["links"] = [
            {"a": wire.a, "b": wire.b, "bandwidth": wire.bandwidth, "latency": wire.latency} for wire in level.wires
        ]
    if level.protocols:
        data["protocols"] = [
            {
                "name": protocol.name,
                "latency": protocol.latency,
                "hop_latency": protocol.hop_latency,
                "bandwidth_efficiency": format_curve(protocol.bandwidth_efficiency),
                **{
                    entry.name: list(value) if isinstance(value, tuple) else value
                    for entry in fields(Protocol)[4:]
                    if (value := getattr(protocol, entry.name)) != entry.default
                },
            }
            for protocol in level.protocols
        ]
    if level.exceptions:
        data["exceptions"] = [
            {"group": exception.group, "latency": exception.latency, "bandwidth": exception.bandwidth}
            for exception in level.exceptions
        ]
    return data


def _parse_devices(table: Table, levels: tuple[LinkLevel, ...]) -> tuple[DeviceGroup, ...]:
    num_devices = levels[-1].group_size
    if num_devices > MAX_DEVICES:
        raise ValueError(f"the levels join {num_devices:,} devices: a cluster has at most {MAX_DEVICES:,}")
    if ("device" in table) == ("devices" in table):
        raise ValueError("the cluster needs either one [device] table or several [[devices]] with a count each")
    if "device" in table:
        device = as_table(table["device"], "device")
        check_keys(device, _DEVICE_KEYS, "device")
        return (DeviceGroup(_parse_device(device, "device"), num_devices),)
    groups = []
    for index, device in enumerate(get_tables(table, "devices", "the cluster")):
        where = f"devices[{index}]"
        check_keys(device, ("count", "levels", *_DEVICE_KEYS), where)
        own_levels = _parse_levels(get_tables(device, "levels", where)) if "levels" in device else ()
        if own_levels and [(each.name, each.group_size) for each in own_levels] != [
            (each.name, each.group_size) for each in levels
        ]:
            raise ValueError(f"{where}.levels must have the names and sizes of the cluster's levels, one for each")
        groups.append(DeviceGroup(_parse_device(device, where), get_count(device, "count", where), own_levels))
    total = sum(group.count for group in groups)
    if total != num_devices:
        raise ValueError(f"the counts of [[devices]] add up to {total}, but the levels join {num_devices} devices")
    return tuple(groups)


def _parse_device(table: Table, where: str) -> Device:
    flops = as_table(get_field(table, "flops", where), f"{where}.flops")
    check_keys(flops, _RATES, f"{where}.flops")
    if "float32" not in flops:
        raise ValueError(f"{where}.flops needs 'float32': it stands in for dtypes that are not listed")
    memory_bytes = get_number(table, "memory_bytes", where)
    return Device(
        name=get_text(table, "name", where),
        flops={dtype: get_number(flops, dtype, f"{where}.flops") for dtype in flops},
        memory_bytes=memory_bytes,
        memory_bandwidth=get_number(table, "memory_bandwidth", where),
        launch_overhead=get_seconds(table, "launch_overhead", where),
        reserved_bytes=get_share(table, "reserved_bytes", where, below=memory_bytes),
        overlap_slowdown=get_share(table, "overlap_slowdown", where, below=1.0),
        host_seconds=get_seconds(table, "host_seconds", where) if "host_seconds" in table else 0.0,
        efficiency=parse_efficiency(table.get("efficiency", {}), f"{where}.efficiency"),
    )


#: Of one device, which has nobody to send to.
_NO_LINK = LinkLevel("no links", 1, latency=0.0, bandwidth=1.0)


def _is_one_device(table: Table) -> bool:
    """Whether a cluster says by ``count = 1`` that it has one device, so that it needs no levels."""
    devices = table.get("devices")
    if "levels" in table or not isinstance(devices, list) or len(devices) != 1:
        return False
    return isinstance(devices[0], dict) and devices[0].get("count") == 1


def _parse_levels(tables: list[Table]) -> tuple[LinkLevel, ...]:
    for index, table in enumerate(tables):
        check_keys(table, _LEVEL_KEYS, f"levels[{index}]")
    sizes = [get_count(table, "size", f"levels[{index}]") for index, table in enumerate(tables)]
    levels = tuple(
        _parse_level(table, f"levels[{index}]", math.prod(sizes[: index + 1]), math.prod(sizes[index + 1 :]))
        for index, table in enumerate(tables)
    )
    check_wiring(levels)
    names = [level.name for level in levels]
    if len(set(names)) != len(names):
        raise ValueError(f"the names of [[levels]] must differ, got {', '.join(names)}")
    return levels


def _parse_level(table: Table, where: str, group_size: int, num_groups: int) -> LinkLevel:
    wiring = get_wiring(table, where)
    wires = parse_wires(table, where) if wiring == "links" else ()
    return LinkLevel(
        name=get_text(table, "name", where),
        group_size=group_size,
        latency=max((wire.latency for wire in wires), default=get_seconds(table, "latency", where)),
        bandwidth=min((wire.bandwidth for wire in wires), default=get_number(table, "bandwidth", where)),
        exceptions=_parse_exceptions(table, where, num_groups),
        shared_by=get_count(table, "shared_by", where) if "shared_by" in table else 1,
        protocols=_parse_protocols(table, where),
        wiring=wiring,
        wires=wires,
    )


def _parse_exceptions(table: Table, where: str, num_groups: int) -> tuple[LinkException, ...]:
    exceptions: list[LinkException] = []
    for index, exception in enumerate(get_tables(table, "exceptions", where) if "exceptions" in table else []):
        here = f"{where}.exceptions[{index}]"
        item = from_plain(LinkException, exception, where=here)
        if not 0 <= item.group < num_groups:
            raise ValueError(f"{here}.group must be an integer from 0 to {num_groups - 1}, got {shown(item.group)}")
        if any(item.group == earlier.group for earlier in exceptions):
            raise ValueError(f"{here}.group: group {item.group} is named twice")
        exceptions.append(item)
    return tuple(exceptions)


def _parse_protocols(table: Table, where: str) -> tuple[Protocol, ...]:
    protocols: list[Protocol] = []
    for index, protocol in enumerate(get_tables(table, "protocols", where) if "protocols" in table else []):
        here = f"{where}.protocols[{index}]"
        check_keys(protocol, _PROTOCOL_KEYS, here)
        name = get_text(protocol, "name", here)
        collectives = _parse_collectives(protocol, here)
        algorithms = _parse_algorithms(protocol, collectives or COLLECTIVES, here)
        if any(name == earlier.name and _may_meet(collectives, earlier.collectives) for earlier in protocols):
            raise ValueError(f"{here}.name: protocol {name!r} is named twice")
        latency = get_seconds(protocol, "latency", here)
        hop = get_seconds(protocol, "hop_latency", here) if "hop_latency" in protocol else 0.0
        reached = parse_curve(protocol.get("bandwidth_efficiency", 1.0), f"{here}.bandwidth_efficiency")
        protocols.append(
            Protocol(
                name,
                latency,
                hop,
                reached,
                collectives,
                own_bandwidth=get_number(protocol, "own_bandwidth", here) if "own_bandwidth" in protocol else math.inf,
                ramp=get_seconds(protocol, "ramp", here) if "ramp" in protocol else 0.0,
                least_group=get_count(protocol, "least_group", here) if "least_group" in protocol else 2,
                in_network=get_flag(protocol, "in_network", here),
                algorithms=algorithms,
            )
        )
    _check_served(protocols, where)
    return tuple(protocols)


def _may_meet(collectives: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """Whether two protocols may both be for one collective."""
    return not collectives or not others or not set(collectives).isdisjoint(others)


def _parse_collectives(protocol: Table, where: str) -> tuple[str, ...]:
    names = protocol.get("collectives", [])
    if not isinstance(names, list) or not all(name in COLLECTIVES for name in names):
        raise ValueError(f"{where}.collectives must be a list of {', '.join(COLLECTIVES)}, got {shown(names)}")
    return tuple(names)


def _parse_algorithms(protocol: Table, collectives: Sequence[str], where: str) -> tuple[str, ...]:
    names = protocol.get("algorithms", [])
    every = dict.fromkeys(name for algorithms in ALGORITHMS.values() for name in algorithms)
    if not isinstance(names, list) or not all(name in every for name in names):
        raise ValueError(f"{where}.algorithms must be a list of {', '.join(every)}, got {shown(names)}")
    for collective in collectives if names else ():
        if not any(name in _ALWAYS_POSSIBLE and name in ALGORITHMS[collective] for name in names):
            able = ", ".join(name for name in ALGORITHMS[collective] if name in _ALWAYS_POSSIBLE)
            raise ValueError(f"{where}.algorithms must name one that can do {collective} over any links ({able})")
    return tuple(names)


def _check_served(protocols: Sequence[Protocol], where: str) -> None:
    for collective in COLLECTIVES if protocols else ():
        if not any(item.serves(collective, 2) and not item.in_network for item in protocols):
            raise ValueError(
                f"{where}.protocols: none is for {collective} of any group; one without 'collectives', 'least_group'"
                " and 'in_network' is for all"
            )
