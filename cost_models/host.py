"""The host of a node: memory beside the devices', and the links (PCI Express) over which devices reach it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cost_models.fields import Count, Positive, shown
from cost_models.hardware import LinkLevel
from cost_models.records import from_plain


@dataclass(frozen=True)
class Host:
    """One host, the same for every node of a cluster.

    Attributes:
        memory_bytes: of the host's memory, all of it.
        memory_bandwidth: bytes per second of that memory, shared by the node's devices.
        link_bandwidth: bytes per second, one direction, that one link to the host reaches.
        link_shared_by: how many devices share one such link.
        level: the link level whose groups are nodes; an empty text: the innermost.
    """

    memory_bytes: Positive
    memory_bandwidth: Positive
    link_bandwidth: Positive
    link_shared_by: Count = 1
    level: str = ""

    def num_devices(self, levels: Sequence[LinkLevel]) -> int:
        """Devices of one node."""
        return next((level.group_size for level in levels if level.name == self.level), levels[0].group_size)

    def carry_seconds(self, num_bytes: float, *, num_devices: int) -> float:
        """Seconds in which every device of a node moves so many bytes to the host, or from it, all at once.

        Each byte passes the device's link, and the host's memory, once.
        """
        return num_bytes / self._link(num_devices) + num_bytes * num_devices / self.memory_bandwidth

    def _link(self, num_devices: int) -> float:
        """Bytes per second, one direction, that each device has to the host if all use their links."""
        return self.link_bandwidth / min(self.link_shared_by, num_devices)

    def update_seconds(self, *, carried_bytes: float, touched_bytes: float, num_devices: int) -> float:
        """Seconds in which every device of a node has its optimizer run on the host, nothing beside anything else.

        Args:
            carried_bytes: over the link of each device, both directions together: they are not taken to overlap.
            touched_bytes: that the update of each device reads and writes in the host's memory.
            num_devices: of the node; all work at once.
        """
        return carried_bytes / self._link(num_devices) + touched_bytes * num_devices / self.memory_bandwidth


def parse_host(data: Any, levels: Sequence[LinkLevel]) -> Host:
    """The table ``[host]`` of a cluster.

    Raises:
        ValueError: naming the field that is missing, unknown or malformed.
    """
    host = from_plain(Host, data, where="host")
    names = [item.name for item in levels]
    if host.level and host.level not in names:
        raise ValueError(f"host.level must be one of the levels {', '.join(names)}, got {shown(host.level)}")
    return host


def format_host(host: Host) -> dict[str, Any]:
    """The inverse of ``parse_host``."""
    table = {"memory_bytes": host.memory_bytes, "memory_bandwidth": host.memory_bandwidth,
             "link_bandwidth": host.link_bandwidth, "link_shared_by": host.link_shared_by}  # fmt: skip
    return {**table, "level": host.level} if host.level else table
