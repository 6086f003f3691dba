"""Which links a group of ranks uses, how many of its members stand behind each, and who else uses them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from cost_models.hardware import LinkLevel, Protocol, crossed_levels


@dataclass(frozen=True)
class Span:
    """What one level does for a group: it joins ``parts`` parts, each of ``inside`` of the group's members.

    Attributes:
        parts: how many parts of the group one group of this level joins.
        inside: members of the group in one part.
        bandwidth: bytes per second for each device while all devices of the cluster use the level at once, as they do
            when every group of a mesh axis runs the same collective.
        message_bandwidth: the same while each rank sends to the next one of its group: only some cross this level.
        latency: seconds of a message.
        protocols: of which one is chosen for a collective.
    """

    parts: int
    inside: int
    bandwidth: float
    message_bandwidth: float
    latency: float
    protocols: tuple[Protocol, ...]

    @staticmethod
    def of_link(size: int, *, latency: float, bandwidth: float) -> Span:
        """``size`` ranks on equal links of their own."""
        return Span(size, 1, bandwidth, bandwidth, latency, (Protocol("simple", latency),))


def route(levels: Sequence[LinkLevel], *, stride: int, size: int) -> tuple[Span, ...]:
    """The levels that a group of ``size`` ranks, ``stride`` apart, uses, innermost first; none for a group of one.

    The mesh is row-major, so all ``stride`` interleaved groups of a block, and all blocks, work at once. Where groups
    are cut unevenly by a level (6 ranks on nodes of 4), all members are taken to meet at the outermost level used: no
    group is better off than that.
    """
    crossed = crossed_levels(levels, stride=stride, size=size)
    if not crossed:
        return ()
    inner_sizes = {level.name: inner for level, inner in zip(levels[1:], (level.group_size for level in levels))}
    sharing = [min(level.shared_by, inner_sizes.get(level.name, level.group_size)) for level in crossed]
    num_devices = levels[-1].group_size
    members = [_members(level.group_size, stride=stride, size=size) for level in crossed]
    if any(count is None for count in members):
        parts, outside = [size], [(crossed[-1], sharing[-1])]
    else:
        counts = [1, *(count for count in members if count is not None)]
        parts, outside = [large // small for small, large in pairwise(counts)], list(zip(crossed, sharing))
    spans, inside = [], 1
    for (level, sharers), count in zip(outside, parts):
        links = level.slowest_link(num_devices)
        spans.append(_span(level, links, parts=count, inside=inside, sharers=sharers, stride=stride))
        inside *= count
    return tuple(spans)


def _members(level_size: int, *, stride: int, size: int) -> int | None:
    """Members of each group in one group of a level of ``level_size`` devices, None if they are not equally many."""
    if level_size % (stride * size) == 0:
        return size
    if level_size % stride == 0 and (stride * size) % level_size == 0:
        return level_size // stride
    return None


def _span(level: LinkLevel, link: tuple[float, float], *, parts: int, inside: int, sharers: int, stride: int) -> Span:
    """The span of a level whose slowest ``link`` has (latency, bandwidth), each link shared by ``sharers`` devices."""
    latency, bandwidth = link
    slower = latency - level.latency
    protocols = level.protocols or (Protocol("simple", level.latency),)
    return Span(
        parts=parts,
        inside=inside,
        bandwidth=bandwidth / sharers,
        # of the devices on one link those pass a message on whose neighbour lies beyond: the last ``stride`` ones
        message_bandwidth=bandwidth / min(sharers, stride),
        latency=latency,
        protocols=tuple(replace(item, latency=item.latency + slower) for item in protocols),
    )


def group_size(spans: Sequence[Span]) -> int:
    """Ranks of the group."""
    return math.prod(span.parts for span in spans)
