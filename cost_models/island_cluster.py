"""``IslandCluster``: clusters in several places, with slow links between them, as a TOML file says.

::

    name = "two-sites"

    [slow_link]                    # of each island to the others
    latency = 20e-3                # α, seconds
    bandwidth = 1.25e9             # β, bytes/s of the whole island, one direction

    [[islands]]
    cluster = "dgx-h100:4"         # a preset with sizes, or a cluster file, relative to this one
    count = 2                      # optional: so many such islands

    [[islands]]
    cluster = "dgx-a100-80g:2"     # of another device, or another size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost_models.cluster import Cluster
from cost_models.fields import (
    as_table,
    check_finite,
    check_keys,
    get_count,
    get_number,
    get_seconds,
    get_tables,
    get_text,
)
from cost_models.files import read_toml
from cost_models.hardware import LinkException, LinkLevel
from cost_models.text import printable


@dataclass(frozen=True)
class IslandCluster:
    """Islands, and the links between them: ``latency`` in seconds, ``bandwidth`` in bytes/s of each island."""

    name: str
    islands: tuple[Cluster, ...]
    latency: float
    bandwidth: float

    @staticmethod
    def from_toml(path: str | Path) -> IslandCluster:
        """Read a file in the format of the module docstring.

        Raises:
            ValueError: if it cannot be read, or a field is missing, unknown, malformed or infinite.
        """
        data = read_toml(path, what="cluster file")
        try:
            check_finite(data, "the cluster")
            return _parsed(data, Path(path).parent)
        except ValueError as error:
            raise ValueError(f"cluster file '{printable(str(path))}': {error}") from error

    def exchange_seconds(self, num_bytes: float) -> float:
        """Seconds of an all-reduce of ``num_bytes`` among the islands: a ring, of which each island sends
        2·(n − 1)/n·``num_bytes`` in 2·(n − 1) steps."""
        count = len(self.islands)
        return 2 * (count - 1) * self.latency + 2 * (count - 1) / count * num_bytes / self.bandwidth

    def gather_seconds(self, num_bytes: float) -> float:
        """Seconds in which each island gets the ``num_bytes`` of every other one, in a ring."""
        return (len(self.islands) - 1) * (self.latency + num_bytes / self.bandwidth)

    def joined(self) -> Cluster:
        """All islands as one cluster with a level more.

        Raises:
            ValueError: if they have nodes of different sizes, or different numbers of nodes.
        """
        first = self.islands[0]
        sizes = {tuple((level.group_size, level.wiring) for level in island.levels) for island in self.islands}
        if len(sizes) > 1:
            raise ValueError("a synchronous step needs islands of the same size, in nodes of the same size")
        levels = [_joined_level([island.levels[index] for island in self.islands], first.num_devices)
                  for index in range(len(first.levels))]  # fmt: skip
        slow = LinkLevel(
            "slow link",
            first.num_devices * len(self.islands),
            self.latency,
            self.bandwidth,
            shared_by=first.num_devices,
        )
        groups = tuple(group for island in self.islands for group in island.groups)
        return Cluster(self.name, groups, (*levels, slow))


def has_islands(path: str) -> bool:
    """Whether a cluster's name is that of a file with islands in it."""
    return path.endswith(".toml") and "islands" in read_toml(path, what="cluster file")


def _parsed(data: Any, folder: Path) -> IslandCluster:
    table = as_table(data, "the cluster")
    check_keys(table, ("name", "slow_link", "islands"), "the cluster")
    link = as_table(table.get("slow_link"), "slow_link")
    check_keys(link, ("latency", "bandwidth"), "slow_link")
    islands: list[Cluster] = []
    for index, entry in enumerate(get_tables(table, "islands", "the cluster")):
        where = f"islands[{index}]"
        check_keys(entry, ("cluster", "count"), where)
        text = get_text(entry, "cluster", where)
        cluster = Cluster.parse(str(folder / text) if text.endswith(".toml") else text)
        islands += [cluster] * (get_count(entry, "count", where) if "count" in entry else 1)
    if len(islands) < 2:
        raise ValueError("there must be at least two islands; one is a cluster file of its own")
    latency, bandwidth = get_seconds(link, "latency", "slow_link"), get_number(link, "bandwidth", "slow_link")
    return IslandCluster(get_text(table, "name", "the cluster"), tuple(islands), latency, bandwidth)


def _joined_level(levels: Sequence[LinkLevel], num_devices: int) -> LinkLevel:
    """One level of all islands: where their links differ, each island's groups are exceptions of the first's."""
    first, exceptions = levels[0], []
    groups = num_devices // first.group_size
    for island, level in enumerate(levels):
        alike = replace(level, latency=first.latency, bandwidth=first.bandwidth, exceptions=(), name=first.name)
        if alike != replace(first, exceptions=()):
            raise ValueError(f"a synchronous step needs levels alike: {first.name!r} and {level.name!r} differ in more "
                             "than latency and bandwidth")  # fmt: skip
        for group in range(groups):
            latency, bandwidth = level.group_link(group)
            if (latency, bandwidth) != (first.latency, first.bandwidth):
                exceptions.append(LinkException(island * groups + group, latency, bandwidth))
    return replace(first, exceptions=tuple(exceptions))
