"""Bisection bandwidth of a cluster, read off its levels' graphs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cost_models.cluster_graph import OUTSIDE, num_parts, part_uplinks, parts_graph
from cost_models.hardware import LinkLevel
from cost_models.link_loads import Node

if TYPE_CHECKING:
    import networkx


def bisection_bandwidth(levels: Sequence[LinkLevel]) -> float:
    """Bytes per second from one half of the devices to the other, in rank order cut at the level where it is least.

    The outermost level that joins anything is cut in half; of a torus every dimension. Infinite for one device.
    """
    joining = [index for index in range(len(levels)) if num_parts(levels, index) > 1]
    if not joining:
        return math.inf
    outermost = joining[-1]
    if not levels[outermost].is_direct:
        return num_parts(levels, outermost) // 2 * _uplink_bandwidth(levels, outermost)
    dimensions = [index for index in joining if all(levels[other].is_direct for other in joining if other >= index)]
    return min(_half(levels, index) * levels[-1].group_size / num_parts(levels, index) for index in dimensions)


def _uplink_bandwidth(levels: Sequence[LinkLevel], index: int) -> float:
    """Bytes per second that leave one part over a level of switches."""
    graph, ranks = part_uplinks(levels, index)
    leaving = _flow(graph, ranks, [OUTSIDE])
    return leaving if index else leaving / len(ranks)  # in the innermost level each device is a part


def _half(levels: Sequence[LinkLevel], index: int) -> float:
    """Bytes per second between the halves of one group of a direct level's parts."""
    graph, parts = parts_graph(levels, index), num_parts(levels, index)
    return _flow(graph, range(parts // 2), range(parts // 2, parts))


def _flow(graph: networkx.DiGraph, sources: Iterable[Node], targets: Iterable[Node]) -> float:
    """The most that can pass from all ``sources`` together to all ``targets``, bytes per second."""
    import networkx  # imported here: it takes longer than everything else in this package

    for source in sources:
        graph.add_edge("all sources", source, bandwidth=math.inf)
    for target in targets:
        graph.add_edge(target, "all targets", bandwidth=math.inf)
    return float(networkx.maximum_flow_value(graph, "all sources", "all targets", capacity="bandwidth"))
