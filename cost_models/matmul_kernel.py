"""Seconds of a matrix product from what its kernel does: tiles on processors, in waves, split along k, bytes moved.

Measured devices have one (``cost_models/presets/efficiency``); ``benchmarks.kernel_fits`` fits it to a table of
measured products, and says how far products that it was not fitted to are off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from cost_models.fields import Count

#: (batch, m, n, k): ``batch`` products of an m×k by a k×n matrix.
MatmulShape = tuple[int, int, int, int]

#: Tiles of the output that kernels have, in either orientation.
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (64, 16), (16, 64))
#: Into how many parts kernels split the sum along k.
SPLITS = (1, 2, 4, 8, 16, 32)
#: Sides of tiles are counted in units of this.
_SIDE = 64.0

#: Least and most of what is not any number from 0.
_RANGES = {
    "processors": (1.0, np.inf),
    "sharpness": (1.0, np.inf),
    "rate": (0.01, 2.0),
    "cache": (0.01, np.inf),
    "rounding": (0.0, 1.0),
    "stream": (0.01, 1.0),
    "sustained": (0.01, 1.0),
}

_ROWS, _COLUMNS, _PARTS = (
    np.array(each, dtype=float) for each in zip(*((*tile, parts) for tile in TILES for parts in SPLITS))
)


@dataclass(frozen=True)
class MatmulKernel:
    """A product of ``batch`` matrices m×k by k×n takes, for the best tile of r rows and c columns and the best split s,

        ramp + [s > 1]·split_ramp + (arithmetic^p + reads^p + memory^p)^(1/p)
        arithmetic = waves·(k/s + depth)·2rc / (sustained·rate·peak/processors) · (1 + side·(64/r + 64/c))
        waves = max(1, x + rounding·(⌈x⌉ − x)),  x = s·tiles/processors,  tiles = batch·⌈m/r⌉·⌈n/c⌉
        reads = tiles·(r + c)·k·item / (cache·bandwidth)
        memory = (bytes + [s > 1]·split_bytes·4s·m·n·batch) / (stream·bandwidth)

    where p is ``sharpness``: the three run beside each other, not perfectly. Tiles and waves: "Matrix Multiplication
    Background User's Guide", NVIDIA, sections 2.3 and 3. More work never takes less time, and one of n equal parts,
    along any dim, never less than 1/n of the whole: every tile and split is open to both.

    Attributes:
        processors: tiles that run at once.
        ramp: seconds before the first product and after the last.
        rate: share of the peak that a large tile would reach without its sides.
        side: time that reading a tile's sides adds, for sides of 64.
        depth: filling and emptying a tile's pipeline costs as much as so many steps along k.
        rounding: share of an unfinished last wave that costs as a full one (0 where tiles are handed out evenly).
        cache: bandwidth at which tiles read their operands, over that of memory.
        stream: share of memory bandwidth that is reached.
        sharpness: how well arithmetic and reading overlap; ∞ would be perfectly.
        split_ramp, split_bytes: seconds and share of the partial sums' bytes that a split along k adds.
        sustained: share of the rate that is left in training, where the chip is at its power limit.
    """

    processors: Count
    ramp: float
    rate: float
    side: float
    depth: float
    rounding: float
    cache: float
    stream: float
    sharpness: float
    split_ramp: float
    split_bytes: float
    sustained: float = 1.0

    def __post_init__(self) -> None:
        check_ranges("a matmul kernel", {each.name: getattr(self, each.name) for each in fields(self)})

    def seconds(
        self,
        shape: MatmulShape,
        *,
        flops: float,
        num_bytes: float,
        item_size: int,
        peak: float,
        bandwidth: float,
    ) -> float:
        """Seconds of one product.

        Args:
            shape: (batch, m, n, k).
            flops: 2 · batch · m · n · k; of an operator that repeats products of the shape a multiple.
            num_bytes: that are read from and written to memory.
            item_size: bytes of an element.
            peak, bandwidth: of the device, in operations and bytes per second.
        """
        return flops / (2.0 * math.prod(shape)) * _seconds(self, shape, num_bytes, item_size, peak, bandwidth)

    def seconds_of_many(
        self, shapes: Any, *, num_bytes: Any, item_size: int, peak: float, bandwidth: float
    ) -> np.ndarray[Any, Any]:
        """As ``seconds``, of shapes [products, 4] and bytes [products]."""
        batch, m, n, k = (
            np.asarray(column, dtype=float)[..., None] for column in np.moveaxis(np.asarray(shapes), -1, 0)
        )
        moved = np.asarray(num_bytes, dtype=float)[..., None]
        is_split = _PARTS > 1
        tiles = batch * np.ceil(m / _ROWS) * np.ceil(n / _COLUMNS)
        turns = _PARTS * tiles / self.processors
        waves = np.maximum(1.0, turns + self.rounding * (np.ceil(turns) - turns) if self.rounding else turns)
        rate = (
            self.sustained * self.rate * peak / self.processors / (1 + self.side * (_SIDE / _ROWS + _SIDE / _COLUMNS))
        )
        arithmetic = waves * (k / _PARTS + self.depth) * (2 * _ROWS * _COLUMNS / rate)
        reads = tiles * (_ROWS + _COLUMNS) * k * (item_size / (self.cache * bandwidth))
        partial_sums = np.where(is_split, self.split_bytes * 4 * _PARTS, 0.0) * (m * n * batch)
        memory = (moved + partial_sums) / (self.stream * bandwidth)
        power = self.sharpness
        together = (arithmetic**power + reads**power + memory**power) ** (1 / power)
        fastest: np.ndarray[Any, Any] = (together + np.where(is_split, self.split_ramp, 0.0)).min(axis=-1)
        return self.ramp + fastest


def check_ranges(what: str, numbers: Mapping[str, float]) -> None:
    """Check the numbers of a kernel.

    Raises:
        ValueError: naming the number that no device can have.
    """
    for name, value in numbers.items():
        least, most = _RANGES.get(name, (0.0, np.inf))
        if not least <= value <= most or value == np.inf:
            raise ValueError(f"{name} of {what} must be from {least:g} to {most:g}, got {value}")


@lru_cache(maxsize=1 << 16)
def _seconds(
    kernel: MatmulKernel, shape: MatmulShape, num_bytes: float, item_size: int, peak: float, bandwidth: float
) -> float:
    return float(
        kernel.seconds_of_many(shape, num_bytes=num_bytes, item_size=item_size, peak=peak, bandwidth=bandwidth)
    )
