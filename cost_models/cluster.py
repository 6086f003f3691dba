"""``Cluster``: which devices there are and how they are linked, from a preset, a TOML file or a live mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_models import live
from cost_models.cluster_format import REORDER, SLOWEST, format_cluster, parse_cluster
from cost_models.cluster_graph import num_parts, whole_graph
from cost_models.fields import check_finite, suggest
from cost_models.files import read_toml
from cost_models.hardware import Device, DeviceGroup, LinkLevel, slowest_device
from cost_models.host import Host
from cost_models.measured_profile import Profile
from cost_models.presets import load_preset, preset_names
from cost_models.short_text import fold
from cost_models.text import printable
from cost_models.topology import expand_topology

if TYPE_CHECKING:
    import networkx
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, repr=False)
class Cluster:
    """Devices in rank order, and the levels of links that join them, innermost first.

    Made by ``parse``, ``from_toml``, ``from_dict``, ``from_device_mesh`` or ``uniform``. ``groups`` says which device
    each rank has (one group unless the cluster is mixed). ``profile``: what was measured, if it was. ``unequal``: what
    different devices are planned as, one of ``cost_models.cluster_format.UNEQUAL``. ``host``: what every node has
    beside its devices, None if nothing is said of it.
    """

    name: str
    groups: tuple[DeviceGroup, ...]
    levels: tuple[LinkLevel, ...]
    profile: Profile | None = None
    unequal: str = REORDER
    host: Host | None = None

    def __repr__(self) -> str:
        devices = " + ".join(f"{group.count:,} × {group.device.name}" for group in self.groups)
        levels = ", ".join(
            f"{level.name} over {level.group_size:,}, {level.bandwidth / 1e9:g} GB/s" for level in self.levels
        )
        return fold(f"Cluster({self.name}: {devices}; {levels})")

    @property
    def num_devices(self) -> int:
        return self.levels[-1].group_size

    @property
    def devices_per_node(self) -> int:
        """Devices of one node: a group of the level that ``host`` names, else of the innermost."""
        return self.host.num_devices(self.levels) if self.host else self.levels[0].group_size

    @property
    def device(self) -> Device:
        """The device; of a mixed cluster, the worst of each figure, since all ranks wait for the slowest."""
        return slowest_device(self.groups)

    @property
    def kinds(self) -> tuple[Device, ...]:
        """The different devices, in rank order."""
        devices: list[Device] = []
        for group in self.groups:
            if group.device not in devices:
                devices.append(group.device)
        return tuple(devices)

    @property
    def has_unequal_devices(self) -> bool:
        """Whether stages of a pipeline may be told apart by their devices: there are several kinds, none of them linked
        directly to others, and they do not all count as the slowest."""
        return len(self.kinds) > 1 and self.unequal != SLOWEST and not self.has_direct_links

    def peak_flops(self, dtype: str) -> float:
        """Operations per second of all devices at their peak; each at the slowest's where all count as the slowest."""
        if not self.has_unequal_devices:
            return self.device.peak_flops(dtype) * self.num_devices
        return sum(group.device.peak_flops(dtype) * group.count for group in self.groups)

    @property
    def has_direct_links(self) -> bool:
        """Whether devices pass messages on for each other, so that neighbouring ranks are not always best off."""
        return any(level.is_direct for level in self.levels)

    def memory_of(self, rank: int) -> float:
        """Memory that tensors can use on the device of ``rank``.

        Raises:
            ValueError: if there is no such rank.
        """
        first = 0
        for group in self.groups:
            if first <= rank < first + group.count:
                return group.device.usable_bytes
            first += group.count
        raise ValueError(f"cluster {self.name!r} has ranks 0 to {self.num_devices - 1}, got {rank}")

    def subset(self, num_devices: int) -> Cluster:
        """The first ``num_devices`` devices: part of one group of some level, or several whole groups of one level.

        ``dgx-h100:4`` has subsets of 1, 2 or 4 devices (of one node), of 8, and of 16 or 24 (whole nodes), of 3 or 5 as
        well; but none of 12, which would be a node and a half.

        Raises:
            ValueError: if there are not so many devices, or they would cut a group.
        """
        if not 1 <= num_devices <= self.num_devices:
            raise ValueError(f"cluster {self.name!r} has {self.num_devices} devices, cannot take {num_devices} of them")
        if num_devices == self.num_devices:
            return self
        levels, inner = [], 1
        for index, level in enumerate(self.levels):
            size = min(level.group_size, num_devices)
            if size % inner:
                raise ValueError(
                    f"{num_devices} devices of cluster {self.name!r} would cut a group of {inner}: take a multiple of"
                    f" {inner}, or fewer than it has"
                )
            exceptions = tuple(item for item in level.exceptions if item.group < num_devices // size)
            level = level.with_parts(size // inner, of=num_parts(self.levels, index))
            levels.append(replace(level, group_size=size, exceptions=exceptions))
            inner = size
        groups, remaining = [], num_devices
        for group in self.groups:
            if remaining:
                groups.append(DeviceGroup(group.device, min(remaining, group.count)))
                remaining -= groups[-1].count
        name = f"{self.name}[:{num_devices}]"
        return Cluster(name, tuple(groups), tuple(levels), self.profile, self.unequal, self.host)

    @staticmethod
    def parse(text: str) -> Cluster:
        """Read ``"dgx-h100:32"`` or ``"path/to/cluster.toml"``.

        A preset may be followed by sizes of its levels, outermost first: ``dgx-h100`` is one node of 8, ``dgx-h100:32``
        32 such nodes, ``dgx-h100:2x4`` two nodes of which 4 GPUs are used; ``cpu-local:4`` is one host with 4 devices.
        Several with ``+`` between them are one cluster of unequal devices: ``dgx-a100-80g:2+dgx-v100-32g:2``.

        Raises:
            ValueError: if the preset is not known, the sizes are malformed, or the file is.
        """
        if text.endswith(".toml"):
            return Cluster.from_toml(text)
        if "+" in text:
            return _side_by_side(text, [Cluster.parse(part.strip()) for part in text.split("+")])
        name, colon, sizes = text.partition(":")
        if name not in preset_names():
            hint = suggest(name, preset_names())
            raise ValueError(
                f"unknown cluster {name!r}{hint or ':'} known are {', '.join(preset_names())}; or give the path of a"
                " .toml file"
            )
        preset = load_preset(name)
        try:
            check_finite(preset, "the cluster")
            whole = Cluster.from_dict(dict(expand_topology(preset)))
        except ValueError as error:
            raise ValueError(f"cluster {name!r}: {error}") from error
        return Cluster.from_dict(_resized(dict(expand_topology(preset)), text, sizes)) if colon else whole

    @staticmethod
    def from_toml(path: str | Path) -> Cluster:
        """Read a file in the format that ``cost_models.cluster_format`` documents.

        Raises:
            ValueError: if it cannot be read, is not TOML, or a field is missing, unknown, malformed or infinite.
        """
        data = read_toml(path, what="cluster file")
        try:
            check_finite(data, "the cluster")
            if "islands" in data:
                raise ValueError(
                    "it is of islands with slow links between them, which planner plan and plan_islands take: name the "
                    "cluster of one island"
                )
            return Cluster.from_dict(data)
        except ValueError as error:
            raise ValueError(f"cluster file '{printable(str(path))}': {error}") from error

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Cluster:
        """The inverse of ``to_dict``.

        Raises:
            ValueError: if a field is missing, unknown or malformed.
        """
        return Cluster(*parse_cluster(data))

    def to_dict(self) -> dict[str, Any]:
        """Plain data (also valid TOML, see ``cost_models.cluster_format``)."""
        return format_cluster(self.name, self.groups, self.levels, self.profile, self.unequal, self.host)

    @staticmethod
    def from_device_mesh(mesh: DeviceMesh) -> Cluster:
        """The cluster that a live mesh runs on: CPUs as ``cpu-local``, GPUs by their name and memory.

        A GPU that no preset describes is estimated from its properties. Processes per host come from
        ``LOCAL_WORLD_SIZE`` (set by torchrun), else from the number of visible GPUs.

        Raises:
            ValueError: for a device type that nothing is known of.
        """
        return Cluster.from_dict(live.describe(mesh))

    @staticmethod
    def of_local_devices(device_type: str, num_devices: int) -> Cluster:
        """As ``from_device_mesh``, of so many devices of the type that this process has, whether they are there or not.

        Raises:
            ValueError: as ``from_device_mesh``.
        """
        return Cluster.from_dict(live.describe_devices(device_type, num_devices))

    @staticmethod
    def uniform(
        num_devices: int,
        *,
        latency: float = 1.0,
        bandwidth: float = 1.0,
        flops: float = math.inf,
        memory_bytes: float = math.inf,
        memory_bandwidth: float = math.inf,
        launch_overhead: float = 0.0,
        host_seconds: float = 0.0,
    ) -> Cluster:
        """Equal devices on equal links, for closed forms: as it stands computing is free, and α = β = 1."""
        device = {
            "name": "uniform", "flops": {"float32": flops}, "memory_bytes": memory_bytes,
            "memory_bandwidth": memory_bandwidth, "launch_overhead": launch_overhead, "host_seconds": host_seconds,
        }  # fmt: skip
        level = {"name": "link", "size": num_devices, "latency": latency, "bandwidth": bandwidth}
        return Cluster.from_dict({"name": "uniform", "device": device, "levels": [level]})

    def graph(self) -> networkx.DiGraph:
        """The cluster as a ``networkx`` graph: every device, switch and link, see ``cost_models.cluster_graph``."""
        return whole_graph(self.name, self.groups, self.levels)


def _side_by_side(name: str, parts: list[Cluster]) -> Cluster:
    """Clusters of equally large nodes on one network: at each level all count on the slowest's links, and each part has
    its own among its devices."""
    inner_sizes = {tuple(level.group_size for level in part.levels[:-1]) for part in parts}
    if len(inner_sizes) > 1 or any(part.has_direct_links or part.profile is not None for part in parts):
        raise ValueError(
            f"cannot join {name!r}: expected presets with equally many devices a node, linked by switches; write a file"
            " with [[devices]] for others"
        )
    total = sum(part.num_devices for part in parts)

    def whole(part: Cluster, names: tuple[str, ...]) -> tuple[LinkLevel, ...]:
        levels = tuple(replace(level, name=each) for level, each in zip(part.levels, names))
        return (*levels[:-1], replace(levels[-1], group_size=total))

    names = tuple(level.name for level in parts[0].levels)
    by_part = [whole(part, names) for part in parts]
    slowest = tuple(min(same, key=lambda level: level.bandwidth / level.shared_by) for same in zip(*by_part))
    slowest = tuple(
        replace(level, latency=max(each.latency for each in same)) for level, same in zip(slowest, zip(*by_part))
    )
    groups = [
        DeviceGroup(group.device, group.count, levels) for part, levels in zip(parts, by_part) for group in part.groups
    ]
    return Cluster(name, tuple(groups), slowest)


def _resized(data: dict[str, Any], text: str, sizes: str) -> dict[str, Any]:
    """The preset ``data`` with the outermost levels' sizes replaced by ``sizes`` (``"32"``, ``"2x4"``)."""
    counts = sizes.split("x")
    num_levels = len(data["levels"])
    if not all(count.isdecimal() and int(count) > 0 for count in counts) or len(counts) > num_levels:
        names = " x ".join(level["name"] for level in reversed(data["levels"]))
        raise ValueError(
            f"cannot read cluster {text!r}: after the colon expected sizes of at least 1, at most {num_levels} of them"
            f" ({names}), such as '{data['name']}:4'"
        )
    levels = [dict(level) for level in data["levels"]]
    for level, count in zip(reversed(levels), counts):
        level["size"] = int(count)
        if "links" in level:
            level["links"] = [link for link in level["links"] if _joins(link, int(count))]
    return {**data, "name": text, "levels": levels}


def _joins(link: Mapping[str, Any], size: int) -> bool:
    """Whether both ends of a link are among the first ``size`` parts of its level, or switches."""
    return all(not isinstance(end, int) or end < size for end in (link["a"], link["b"]))
