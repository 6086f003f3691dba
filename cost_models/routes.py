"""Which links a group of ranks uses, and what bandwidth they leave each member while all groups of its axis work.

Bandwidths are read off the graph of each level that the group crosses (``cost_models.cluster_graph``): the flows of an
algorithm are sent over it, and the busiest link decides (``cost_models.link_loads``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from cost_models.cluster_graph import Link, inner_size, num_parts, part_climbs, parts_graph
from cost_models.group_flows import (
    double_tree,
    exchange_flows,
    farthest_flows,
    message_flows,
    ring_flows,
    tree_flows,
)
from cost_models.hardware import LinkLevel, Protocol, crossed_levels
from cost_models.link_loads import Routing


@dataclass(frozen=True)
class GroupBandwidth:
    """Bytes per second that each member sends over a level while every group of its mesh axis does the same.

    Attributes:
        ring: to its neighbours in rings through all members, in both directions.
        tree: up and down two binary trees.
        exchange: to all other members, the same to each.
        message: to the next member of its group.
    """

    ring: float
    tree: float
    exchange: float
    message: float


@dataclass(frozen=True)
class Span:
    """What one level does for a group: it joins ``parts`` parts, each of ``inside`` of the group's members.

    Attributes:
        parts: how many parts of the group one group of this level joins.
        inside: members of the group in one part.
        bandwidth: what each member can send.
        latency: seconds of a message to the next part.
        protocols: of which one is chosen for a collective.
        ring_hops: steps of the level's latency that a step of a ring takes.
        tree_hops: the same, of a way from a leaf of a tree up to its root.
        is_direct: whether devices pass messages on, as in a torus.
    """

    parts: int
    inside: int
    bandwidth: GroupBandwidth
    latency: float
    protocols: tuple[Protocol, ...]
    ring_hops: int
    tree_hops: int
    is_direct: bool = False

    @staticmethod
    def of_link(size: int, *, latency: float, bandwidth: float) -> Span:
        """A span of ``size`` ranks, each with a link of its own."""
        everywhere = GroupBandwidth(bandwidth, bandwidth, bandwidth, bandwidth)
        return Span(size, 1, everywhere, latency, (Protocol("simple", latency),), 1, _tree_depth(size))


def route(levels: Sequence[LinkLevel], *, stride: int, size: int) -> tuple[Span, ...]:
    """The levels that a group of ``size`` ranks, ``stride`` apart, uses, innermost first; none for a group of one.

    The mesh is row-major, so all ``stride`` interleaved groups of a block, and all blocks, work at once. Where groups
    are cut unevenly by a level (6 ranks on nodes of 4), all members are taken to meet at the outermost level used: no
    group is better off than that.
    """
    return _route(tuple(levels), stride, size)


@lru_cache(maxsize=4096)
def _route(levels: tuple[LinkLevel, ...], stride: int, size: int) -> tuple[Span, ...]:
    crossed = [levels.index(level) for level in crossed_levels(levels, stride=stride, size=size)]
    if not crossed:
        return ()
    members = [_members(levels, index, stride=stride, size=size) for index in crossed]
    if any(count is None for count in members):
        return (_uneven(levels, crossed, stride=stride, size=size),)
    counts = [1, *(count for count in members if count is not None)]
    spans: list[Span] = []
    for index, (inside, count) in zip(crossed, pairwise(counts)):
        span = _direct_span if levels[index].is_direct else _switched_span
        spans.append(span(levels, index, parts=count // inside, inside=inside, stride=stride))
    return tuple(_relayed(span, spans[place + 1 :], levels, crossed) for place, span in enumerate(spans))


def group_size(spans: Sequence[Span]) -> int:
    """Ranks of the group."""
    return math.prod(span.parts for span in spans)


def _members(levels: Sequence[LinkLevel], index: int, *, stride: int, size: int) -> int | None:
    """Members of each group in one group of a level, None if not equally many or not at one position of its parts."""
    level_size, inner = levels[index].group_size, inner_size(levels, index)
    if levels[index].is_direct and stride % inner and inner % stride:
        return None
    if level_size % (stride * size) == 0:
        return size
    if level_size % stride == 0 and (stride * size) % level_size == 0:
        return level_size // stride
    return None


def _switched_span(levels: Sequence[LinkLevel], index: int, *, parts: int, inside: int, stride: int) -> Span:
    """A level whose switches are reached over links that devices have of their own, or share."""
    climbs = part_climbs(levels, index)
    # of a part's devices those pass a message on whose neighbour lies beyond: the last ``stride`` ones
    everyone, some = _climbing(climbs), _climbing(climbs[-stride:])
    bandwidth = GroupBandwidth(everyone, everyone, everyone, some)
    latency, _ = levels[index].slowest_link(levels[-1].group_size)
    return Span(parts, inside, bandwidth, latency, _protocols(levels[index], latency), 1, _tree_depth(parts))


def _climbing(climbs: Sequence[Sequence[Link]]) -> float:
    """Units per second that each of some devices can send, or receive, over the only way that it has up a level."""
    links = [link for climb in climbs for link in climb]
    loads = Counter(link[:2] for link in links)
    return min(bandwidth / loads[below, above] for below, above, bandwidth, _, _ in links)


def _direct_span(levels: Sequence[LinkLevel], index: int, *, parts: int, inside: int, stride: int) -> Span:
    """A level whose parts are linked to each other."""
    routing, step = Routing(parts_graph(levels, index)), max(1, stride // inner_size(levels, index))
    block = step * parts
    groups = [
        [first + offset + step * member for member in range(parts)]
        for first in range(0, num_parts(levels, index), block)
        for offset in range(step)
    ]
    bandwidth = GroupBandwidth(
        ring=routing.bandwidth(ring_flows(groups)),
        tree=2 * routing.bandwidth(tree_flows(groups)),
        exchange=routing.bandwidth(exchange_flows(groups)),
        message=routing.bandwidth(message_flows(groups)),
    )
    neighbours = [pair for group in groups for pair in zip(group, [*group[1:], group[0]])]
    latency = max(routing.latency(*pair) for pair in neighbours)
    hops = 1 if levels[index].wires else max(routing.hops(*pair) for pair in neighbours)
    depth = _tree_depth(parts) if levels[index].wires else max(_tree_hops(routing, group) for group in groups)
    protocols = _protocols(levels[index], latency)
    return Span(parts, inside, bandwidth, latency, protocols, hops, depth, is_direct=True)


def _uneven(levels: Sequence[LinkLevel], crossed: list[int], *, stride: int, size: int) -> Span:
    """All members beyond each other's part of the outermost level, over the longest ways of direct ones."""
    outermost = crossed[-1]
    if levels[outermost].is_direct:
        routing, parts = Routing(parts_graph(levels, outermost)), num_parts(levels, outermost)
        flows = farthest_flows(parts)
        least, latency = routing.bandwidth(flows), max(routing.latency(part, *flows[part]) for part in range(parts))
        hops = 1 if levels[outermost].wires else max(routing.hops(part, *flows[part]) for part in range(parts))
        even = Span(
            size, 1, GroupBandwidth(least, least, least, least), latency, _protocols(levels[outermost], latency),
            hops, hops * _tree_depth(size), is_direct=True,
        )  # fmt: skip
    else:
        even = _switched_span(levels, outermost, parts=size, inside=1, stride=stride)
    for index in crossed[:-1]:
        if levels[index].is_direct:
            parts = num_parts(levels, index)
            least = Routing(parts_graph(levels, index)).bandwidth(farthest_flows(parts))
            even = replace(even, bandwidth=_at_most(even.bandwidth, least))
    return even


def _relayed(span: Span, outer: Sequence[Span], levels: Sequence[LinkLevel], crossed: Sequence[int]) -> Span:
    """The span, with what an all-to-all also passes over it on the way to outer parts linked position by position."""
    outside = zip(outer, crossed[-len(outer) :]) if outer else ()
    times = math.prod(other.parts for other, index in outside if levels[index].is_aligned)
    return replace(span, bandwidth=replace(span.bandwidth, exchange=span.bandwidth.exchange / times))


def _tree_hops(routing: Routing, group: Sequence[int]) -> int:
    """Links on the longest way from a leaf to the root, of two trees."""
    longest = 0
    for tree in double_tree(len(group)):
        for leaf in tree:
            hops, member = 0, leaf
            while member in tree:
                hops += routing.hops(group[member], group[tree[member]])
                member = tree[member]
            longest = max(longest, hops)
    return longest


def _tree_depth(parts: int) -> int:
    return math.ceil(math.log2(parts))


def _at_most(bandwidth: GroupBandwidth, least: float) -> GroupBandwidth:
    return GroupBandwidth(
        min(bandwidth.ring, least), min(bandwidth.tree, least), min(bandwidth.exchange, least),
        min(bandwidth.message, least),
    )  # fmt: skip


def _protocols(level: LinkLevel, latency: float) -> tuple[Protocol, ...]:
    """The protocols of a level whose messages take ``latency`` instead of the level's own."""
    protocols = level.protocols or (Protocol("simple", level.latency),)
    return tuple(replace(item, latency=item.latency + (latency - level.latency)) for item in protocols)
