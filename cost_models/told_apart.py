"""From which difference on two plans of one model on the same devices are told apart by their predictions.

``presets/residuals/ordered_pairs.toml`` counts pairs of published runs of one model on one chip, by how far apart they
are predicted, and of how many the faster is the one that is predicted to be. What all predictions have in common is
then left out, so that this is less than the interval of one step. ``python -m benchmarks.published --write`` counts.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources

from cost_models.step_interval import NOMINAL_SHARE


@dataclass(frozen=True)
class OrderedPairs:
    """Pairs that are predicted ``apart`` or more, but less than the row after this: a share of the faster's seconds.

    Attributes:
        right: of how many the faster is the one that is predicted to be.
        pairs: how many there are.
    """

    apart: float
    right: int
    pairs: int


@cache
def ordered_pairs() -> tuple[OrderedPairs, ...]:
    """Of the calibration half of published runs, nearest first."""
    file = resources.files("cost_models.presets") / "residuals" / "ordered_pairs.toml"
    return tuple(OrderedPairs(**row) for row in tomllib.loads(file.read_text(encoding="utf-8"))["distance"])


def told_apart() -> float:
    """The least share by which plans differ that are told apart: pairs so far apart are rightly ordered nine times of
    ten."""
    return least_ordered(ordered_pairs())


def are_told_apart(one: float, other: float) -> bool:
    """Whether two plans of these predicted seconds are told apart."""
    return max(one, other) >= (1.0 + told_apart()) * min(one, other)


def least_ordered(rows: Iterable[OrderedPairs]) -> float:
    """The least distance from which on the nearest pairs are rightly ordered ``NOMINAL_SHARE`` of the time."""
    return next(row.apart for row in rows if row.pairs and row.right >= NOMINAL_SHARE * row.pairs)
