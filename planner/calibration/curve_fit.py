"""Efficiency curves through measured calls: of those that a ``Curve`` can be, one close to the points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from cost_models.efficiency import Curve

#: Sizes are gathered into so many points a factor of ten.
POINTS_PER_DECADE = 2
#: Relative; files keep six digits of a number.
ROUNDING = 1e-4


def fit_curve(points: Iterable[tuple[float, float]]) -> Curve:
    """A curve by (size, efficiency): medians of neighbouring sizes, then the closest that never falls.

    The closest in the sense of least squares of logarithms is isotonic regression (pool adjacent violators: Ayer et
    al., "An empirical distribution function for sampling with incomplete information", 1955). Where the result rises
    faster than a curve may (more work would take less time), the smaller size's efficiency is raised.

    Raises:
        ValueError: if there are no points.
    """
    bins: dict[int, list[tuple[float, float]]] = {}
    for size, efficiency in points:
        bins.setdefault(round(math.log10(size) * POINTS_PER_DECADE), []).append((size, efficiency))
    if not bins:
        raise ValueError("a curve needs at least one measured call")
    rows = [_middle(bins[place]) for place in sorted(bins)]
    levels = _isotonic([math.log(efficiency) for _, efficiency in rows])
    shares = [min(1.0, math.exp(level)) for level in levels]
    for place in range(len(rows) - 2, -1, -1):
        steepest = 1 + math.log(rows[place + 1][0] / rows[place][0])
        shares[place] = max(shares[place], shares[place + 1] / steepest * (1 + ROUNDING))
    return Curve(tuple((size, min(1.0, share)) for (size, _), share in zip(rows, shares)))


def _middle(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The geometric mean of sizes, the median of efficiencies."""
    size = math.exp(sum(math.log(size) for size, _ in points) / len(points))
    return size, median(efficiency for _, efficiency in points)


def _isotonic(values: Sequence[float]) -> list[float]:
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            (mean, count), (last, more) = blocks[-2], blocks[-1]
            blocks[-2:] = [((mean * count + last * more) / (count + more), count + more)]
    return [mean for mean, count in blocks for _ in range(count)]
