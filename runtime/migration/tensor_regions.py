"""Regions of tensors: what two of them share, and what one has that the other has not."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Of every dim the first element and the one behind the last.
Region = tuple[tuple[int, int], ...]


def region_of(offsets: Sequence[int], sizes: Sequence[int]) -> Region:
    """The region of ``sizes`` that begins at ``offsets``."""
    return tuple((offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def num_elements(region: Region) -> int:
    """How many elements a region has; that of a number has one."""
    return math.prod(end - begin for begin, end in region)


def overlap(first: Region, second: Region) -> Region | None:
    """The region that both have; None if there is none."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return shared if all(begin < end for begin, end in shared) else None


def without(region: Region, other: Region) -> list[Region]:
    """Regions that together are what ``region`` has and ``other`` has not; none of them overlap."""
    if not num_elements(region):
        return []
    shared = overlap(region, other)
    if shared is None:
        return [region]
    rest, inside = [], list(region)
    for dim, ((begin, end), (first, last)) in enumerate(zip(region, shared)):
        for low, high in ((begin, first), (last, end)):
            if low < high:
                rest.append((*inside[:dim], (low, high), *inside[dim + 1 :]))
        inside[dim] = (first, last)
    return rest


def without_all(regions: Sequence[Region], others: Sequence[Region]) -> list[Region]:
    """What ``regions`` have and none of ``others`` has."""
    rest = [region for region in regions if num_elements(region)]
    for other in others:
        rest = [part for region in rest for part in without(region, other)]
    return rest
