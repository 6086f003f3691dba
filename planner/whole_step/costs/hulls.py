"""Convex hulls of choices between bytes and seconds: what a relaxation takes fractions of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lower convex hull of points (bytes, seconds), from most bytes to fewest."""
    best: dict[float, float] = {}
    for num_bytes, cost in points:
        best[num_bytes] = min(cost, best.get(num_bytes, math.inf))
    edge: list[tuple[float, float]] = []
    for num_bytes, cost in sorted(best.items(), reverse=True):
        if edge and cost <= edge[-1][1]:
            edge.pop()
        while len(edge) > 1 and _steeper(edge[-2], edge[-1], (num_bytes, cost)):
            edge.pop()
        edge.append((num_bytes, cost))
    return edge


def steps_along(edge: Sequence[tuple[float, float]]) -> list[tuple[float, float, float]]:
    """(seconds a byte, bytes freed, seconds) from each point of a hull to the next."""
    return [
        ((cost - less) / max(1.0, most - fewer), most - fewer, cost - less)
        for (most, less), (fewer, cost) in pairwise(edge)
    ]


def _steeper(first: tuple[float, float], middle: tuple[float, float], last: tuple[float, float]) -> bool:
    """Whether ``middle`` is no better than a convex combination of its neighbours."""
    freed, cost = first[0] - last[0], last[1] - first[1]
    return (middle[1] - first[1]) * freed >= cost * (first[0] - middle[0])
