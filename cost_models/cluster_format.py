"""Clusters as plain data: the format of TOML files, of the presets, and of ``Cluster.to_dict``.

::

    name = "two-boxes"             # any name

    [device]                       # every device alike; or several [[devices]] with a count each, in rank order
    name = "My GPU"
    memory_bytes = 24e9            # bytes
    memory_bandwidth = 1e12        # bytes/s
    launch_overhead = 4e-6         # seconds
    [device.flops]                 # dense peak per second by dtype; float32 is required and stands in for the rest
    float32 = 40e12
    tfloat32 = 80e12               # float32 with TF32 allowed
    bfloat16 = 160e12

    [[levels]]                     # links, innermost first
    name = "pcie"
    size = 4                       # how many devices (or groups of the level before) one group joins
    latency = 14e-6                # α, seconds
    bandwidth = 12e9               # β, bytes/s per device, one direction

    [[levels]]
    name = "network"
    size = 2
    latency = 22e-6
    bandwidth = 3e9
    [[levels.exceptions]]          # optional: a group of this level (counted in rank order) with slower links
    group = 0
    latency = 22e-6
    bandwidth = 1e9

Ranks are numbered node after node. Every number must be positive (latency and launch_overhead may be 0); ``inf`` is
allowed for rates and memory. A preset file may also have a ``[match]`` table, see ``cost_models.live``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from cost_models.dtypes import ITEM_SIZE, TFLOAT32
from cost_models.hardware import Device, DeviceGroup, LinkException, LinkLevel

Table = Mapping[str, Any]

_TOP_KEYS = ("name", "device", "devices", "levels", "match")
_DEVICE_KEYS = ("name", "flops", "memory_bytes", "memory_bandwidth", "launch_overhead")
_LEVEL_KEYS = ("name", "size", "latency", "bandwidth", "exceptions")
_EXCEPTION_KEYS = ("group", "latency", "bandwidth")
_RATES = (*ITEM_SIZE, TFLOAT32)


def parse_cluster(data: Any) -> tuple[str, tuple[DeviceGroup, ...], tuple[LinkLevel, ...]]:
    """Name, devices in rank order, and link levels of a cluster written as in the module docstring.

    Raises:
        ValueError: naming the field that is missing, unknown or malformed, and what was expected.
    """
    table = _table(data, "the cluster")
    _known_keys(table, _TOP_KEYS, "the cluster")
    levels = _parse_levels(_tables(table, "levels", "the cluster"))
    return _text(table, "name", "the cluster"), _parse_devices(table, levels[-1].group_size), levels


def format_cluster(name: str, groups: tuple[DeviceGroup, ...], levels: tuple[LinkLevel, ...]) -> dict[str, Any]:
    """The inverse of ``parse_cluster``: dicts, lists, strings and numbers only."""
    data: dict[str, Any] = {"name": name}
    if len(groups) == 1:
        data["device"] = _format_device(groups[0].device)
    else:
        data["devices"] = [{"count": group.count, **_format_device(group.device)} for group in groups]
    data["levels"] = []
    inner = 1
    for level in levels:
        data["levels"].append(_format_level(level, level.group_size // inner))
        inner = level.group_size
    return data


def _format_device(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "flops": dict(device.flops),
        "memory_bytes": device.memory_bytes,
        "memory_bandwidth": device.memory_bandwidth,
        "launch_overhead": device.launch_overhead,
    }


def _format_level(level: LinkLevel, size: int) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": level.name, "size": size, "latency": level.latency, "bandwidth": level.bandwidth,
    }  # fmt: skip
    if level.exceptions:
        data["exceptions"] = [
            {"group": exception.group, "latency": exception.latency, "bandwidth": exception.bandwidth}
            for exception in level.exceptions
        ]
    return data


def _parse_devices(table: Table, num_devices: int) -> tuple[DeviceGroup, ...]:
    if ("device" in table) == ("devices" in table):
        raise ValueError("the cluster needs either one [device] table or several [[devices]] with a count each")
    if "device" in table:
        device = _table(table["device"], "device")
        _known_keys(device, _DEVICE_KEYS, "device")
        return (DeviceGroup(_parse_device(device, "device"), num_devices),)
    groups = []
    for index, device in enumerate(_tables(table, "devices", "the cluster")):
        where = f"devices[{index}]"
        _known_keys(device, ("count", *_DEVICE_KEYS), where)
        groups.append(DeviceGroup(_parse_device(device, where), _count(device, "count", where)))
    total = sum(group.count for group in groups)
    if total != num_devices:
        raise ValueError(f"the counts of [[devices]] add up to {total}, but the levels join {num_devices} devices")
    return tuple(groups)


def _parse_device(table: Table, where: str) -> Device:
    flops = _table(_field(table, "flops", where), f"{where}.flops")
    _known_keys(flops, _RATES, f"{where}.flops")
    if "float32" not in flops:
        raise ValueError(f"{where}.flops needs 'float32': it stands in for dtypes that are not listed")
    return Device(
        name=_text(table, "name", where),
        flops={dtype: _number(flops, dtype, f"{where}.flops") for dtype in flops},
        memory_bytes=_number(table, "memory_bytes", where),
        memory_bandwidth=_number(table, "memory_bandwidth", where),
        launch_overhead=_seconds(table, "launch_overhead", where),
    )


def _parse_levels(tables: list[Table]) -> tuple[LinkLevel, ...]:
    for index, table in enumerate(tables):
        _known_keys(table, _LEVEL_KEYS, f"levels[{index}]")
    sizes = [_count(table, "size", f"levels[{index}]") for index, table in enumerate(tables)]
    levels = tuple(
        _parse_level(table, f"levels[{index}]", math.prod(sizes[: index + 1]), math.prod(sizes[index + 1 :]))
        for index, table in enumerate(tables)
    )
    names = [level.name for level in levels]
    if len(set(names)) != len(names):
        raise ValueError(f"the names of [[levels]] must differ, got {', '.join(names)}")
    return levels


def _parse_level(table: Table, where: str, group_size: int, num_groups: int) -> LinkLevel:
    exceptions: list[LinkException] = []
    for index, exception in enumerate(_tables(table, "exceptions", where) if "exceptions" in table else []):
        here = f"{where}.exceptions[{index}]"
        _known_keys(exception, _EXCEPTION_KEYS, here)
        group = _field(exception, "group", here)
        if isinstance(group, bool) or not isinstance(group, int) or not 0 <= group < num_groups:
            raise ValueError(f"{here}.group must be an integer from 0 to {num_groups - 1}, got {group!r}")
        if any(group == earlier.group for earlier in exceptions):
            raise ValueError(f"{here}.group: group {group} is named twice")
        latency, bandwidth = _seconds(exception, "latency", here), _number(exception, "bandwidth", here)
        exceptions.append(LinkException(group, latency, bandwidth))
    return LinkLevel(
        name=_text(table, "name", where),
        group_size=group_size,
        latency=_seconds(table, "latency", where),
        bandwidth=_number(table, "bandwidth", where),
        exceptions=tuple(exceptions),
    )


def suggest(word: str, known: Iterable[str]) -> str:
    """``", did you mean 'x'?"`` if something known is spelt like ``word``, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _field(table: Table, key: str, where: str) -> Any:
    if key not in table:
        raise ValueError(f"{where} needs {key!r}")
    return table[key]


def _known_keys(table: Table, known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            hint = suggest(str(key), known) or f": expected one of {', '.join(known)}"
            raise ValueError(f"{where} has an unknown field {key!r}{hint}")


def _table(value: Any, where: str) -> Table:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a table, got {value!r}")
    return value


def _tables(table: Table, key: str, where: str) -> list[Table]:
    value = _field(table, key, where)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: {key!r} must be a list of at least one table ([[{key}]]), got {value!r}")
    return [_table(item, f"{key}[{index}]") for index, item in enumerate(value)]


def _text(table: Table, key: str, where: str) -> str:
    value = _field(table, key, where)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}.{key} must be a text, got {value!r}")
    return value


def _count(table: Table, key: str, where: str) -> int:
    value = _field(table, key, where)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}.{key} must be an integer of at least 1, got {value!r}")
    return value


def _number(table: Table, key: str, where: str) -> float:
    value = _field(table, key, where)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{where}.{key} must be a number above 0, got {value!r}")
    return float(value)


def _seconds(table: Table, key: str, where: str) -> float:
    value = _field(table, key, where)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{where}.{key} must be a finite number of seconds, 0 or more, got {value!r}")
    return float(value)
