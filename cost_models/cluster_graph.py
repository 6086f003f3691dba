"""The ``networkx`` graphs of a cluster: of all devices and switches, and of one level up to symmetry.

An edge is one direction of a link, with ``bandwidth`` (bytes/s), ``latency`` (s; along a route they add up to the
level's), ``level`` (name) and ``weight``, by which routes are chosen: those of a level weigh more than any route over
the levels inside, so a message takes outer links only where inner ones do not lead.

A cluster of 16,384 devices is priced without its whole graph. All parts of a level are wired alike (where links
differ, the slowest counts), so one part that sends to the outside (``part_uplinks``), or the parts as single nodes
(``parts_graph``), carries the same traffic on every link as the whole; tests hold one against the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from cost_models.hardware import DeviceGroup, LinkLevel
from cost_models.link_loads import Node

if TYPE_CHECKING:
    import networkx

#: The node that stands for all other parts.
OUTSIDE = "outside"
#: Factor by which a link outweighs one of the level inside: no inner route has that many links.
_WEIGHT = 10_000

#: Two nodes, bandwidth, latency, index of the level.
Link = tuple[Node, Node, float, float, int]
#: (latency, bandwidth) of a level's links in the group of a number.
Figures = Callable[[LinkLevel, int], tuple[float, float]]


def whole_graph(name: str, groups: Sequence[DeviceGroup], levels: Sequence[LinkLevel]) -> networkx.DiGraph:
    """Every device (its rank, attribute ``device``), every switch (a text) and every link of a cluster."""
    import networkx  # imported here: it takes longer than everything else in this package

    graph = networkx.DiGraph(name=name)
    devices = [group.device for group in groups for _ in range(group.count)]
    graph.add_nodes_from((rank, {"device": device}) for rank, device in enumerate(devices))
    for index, level in enumerate(levels):
        if level.is_direct:
            _add(graph, _direct_links(levels, index), levels)
        else:
            climbs = (_climb(levels, index, rank, LinkLevel.group_link) for rank in range(len(devices)))
            _add(graph, (link for climb in climbs for link in climb), levels)
    return graph


def parts_graph(levels: Sequence[LinkLevel], index: int) -> networkx.DiGraph:
    """The parts of one group of a direct level as nodes: what links the devices at one position of each part."""
    import networkx

    graph = networkx.DiGraph()
    graph.add_nodes_from(range(num_parts(levels, index)))
    level = levels[index]
    slowest = level.slowest_link(levels[-1].group_size)
    _add(graph, ((*link, index) for link in _wires(level, num_parts(levels, index), *slowest)), levels)
    return graph


def part_climbs(levels: Sequence[LinkLevel], index: int) -> list[list[Link]]:
    """Of each device of one part, the links up to the switch of a level, behind which the other parts are."""

    def slowest(level: LinkLevel, _: int) -> tuple[float, float]:
        return level.slowest_link(levels[-1].group_size)

    ranks = range(inner_size(levels, index) if index else sharers(levels, index))
    return [list(_climb(levels, index, rank, slowest)) for rank in ranks]


def part_uplinks(levels: Sequence[LinkLevel], index: int) -> tuple[networkx.DiGraph, range]:
    """The same as a graph in which ``OUTSIDE`` stands behind the switch; and the devices' ranks."""
    import networkx

    graph, climbs = networkx.DiGraph(), part_climbs(levels, index)
    for climb in climbs:
        _add(graph, [*climb, (climb[-1][1], OUTSIDE, math.inf, 0.0, index)], levels)
    return graph, range(len(climbs))


def inner_size(levels: Sequence[LinkLevel], index: int) -> int:
    """Devices of one part of level number ``index``."""
    return levels[index - 1].group_size if index else 1


def num_parts(levels: Sequence[LinkLevel], index: int) -> int:
    return levels[index].group_size // inner_size(levels, index)


def sharers(levels: Sequence[LinkLevel], index: int) -> int:
    """Devices that share one link of a level: at most those of one part (at the innermost level: of its group)."""
    return min(levels[index].shared_by, inner_size(levels, index) if index else levels[index].group_size)


def _climb(levels: Sequence[LinkLevel], index: int, rank: int, figures: Figures) -> Iterator[Link]:
    """The links from a device up to the switch that joins it to the other parts of its group, the device's first."""
    level, inner, sharing = levels[index], inner_size(levels, index), sharers(levels, index)
    group = rank // level.group_size
    latency, bandwidth = figures(level, group)
    switch = f"{level.name}[{group}]"
    if level.wiring == "uplink":
        below = list(_climb(levels, index - 1, rank, figures))
        yield from below
        added = latency - figures(levels[index - 1], rank // inner)[0]
        yield below[-1][1], switch, bandwidth, max(0.0, added / 2), index
        return
    place = rank % inner if index else rank % level.group_size
    if level.wiring == "rail":
        switch = f"{switch} rail {place // sharing}"
    start: Node = rank
    if sharing > 1:
        start = f"{level.name} link {place // sharing} of part {rank // inner if index else group}"
        yield rank, start, math.inf, 0.0, index
    yield start, switch, bandwidth, latency / 2, index


def _direct_links(levels: Sequence[LinkLevel], index: int) -> Iterator[Link]:
    """The links of every position of every group of a direct level."""
    level, inner = levels[index], inner_size(levels, index)
    for group in range(levels[-1].group_size // level.group_size):
        links = list(_wires(level, num_parts(levels, index), *level.group_link(group)))
        for position in range(inner):
            first = group * level.group_size + position
            for a, b, bandwidth, latency in links:
                ends = (
                    first + inner * node if isinstance(node, int) else f"{level.name}[{group}] {node} {position}"
                    for node in (a, b)
                )
                yield *ends, bandwidth, latency, index  # type: ignore[misc]


def _wires(level: LinkLevel, parts: int, latency: float, bandwidth: float) -> Iterable[tuple[Node, Node, float, float]]:
    """The links between the parts of a group of a direct level, those of rings and lines with these figures."""
    if level.wiring == "links":
        return [(wire.a, wire.b, wire.bandwidth, wire.latency) for wire in level.wires]
    pairs = [(part, part + 1) for part in range(parts - 1)]
    if level.wiring == "ring" and parts > 2:
        pairs.append((parts - 1, 0))
    return [(a, b, bandwidth, latency) for a, b in pairs]


def _add(graph: networkx.DiGraph, links: Iterable[Link], levels: Sequence[LinkLevel]) -> None:
    """Add both directions of links; links of equal ends are one, their bandwidths are not added."""
    for a, b, bandwidth, latency, index in links:
        figures = {
            "bandwidth": bandwidth, "latency": latency, "level": levels[index].name, "weight": _WEIGHT**index,
        }  # fmt: skip
        graph.add_edge(a, b, **figures)
        graph.add_edge(b, a, **figures)
