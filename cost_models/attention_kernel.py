"""Seconds of fused attention from what its kernel does: blocks of queries that walk over blocks of keys.

Measured devices have one (``cost_models/presets/efficiency``), fitted as ``cost_models.matmul_kernel`` says.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from cost_models.fields import Count
from cost_models.matmul_kernel import MatmulShape, check_ranges

#: Queries, and keys, of a block.
BLOCK = 128


@dataclass(frozen=True)
class AttentionKernel:
    """Attention of ``count`` heads of samples, of ``rows`` queries and ``columns`` keys of ``width`` entries, takes

        ramp + (arithmetic^p + memory^p)^(1/p)
        arithmetic = max(x + tail·longest·min(1, blocks/processors), longest)·products·4·128²·width
            / (sustained·rate·peak/processors)
        x = pairs of blocks that are computed / processors,  longest = most pairs of one block of queries
        memory = bytes / (stream·bandwidth)

    where p is ``sharpness``. A causal call skips the pairs above the diagonal, and its blocks of queries are of all
    lengths from one pair to ``longest``: ``tail`` is what of the longest is still running when the others have ended.
    Source: Dao, "FlashAttention-2", 2023, section 3. More heads or queries never take less time, and one of n equal
    parts of the heads never less than 1/n of the whole.

    Attributes:
        processors: blocks of queries that run at once.
        ramp: seconds before the first block and after the last.
        rate: share of the peak that a block reaches.
        tail: share of the longest block's time in which processors idle at the end.
        stream: share of memory bandwidth that is reached.
        sharpness: how well arithmetic and reading overlap.
        products: operations over those of a forward call.
        sustained: share of the rate that is left in training, where the chip is at its power limit.
    """

    processors: Count
    ramp: float
    rate: float
    tail: float
    stream: float
    sharpness: float
    products: float = 1.0
    sustained: float = 1.0

    def __post_init__(self) -> None:
        check_ranges("an attention kernel", {each.name: getattr(self, each.name) for each in fields(self)})

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
        """Seconds of one call.

        Args:
            shape: (count, rows, columns, width): of the product that makes the scores.
            flops: 4 · products · count · rows · columns · width where every query sees every key; fewer mean a causal
                call.
            num_bytes: that are read from and written to memory.
            item_size: bytes of an element.
            peak, bandwidth: of the device, in operations and bytes per second.
        """
        count, rows, columns, width = shape
        is_causal = flops < 3.9 * self.products * count * rows * columns * width
        return _seconds(self, shape, is_causal, num_bytes, peak, bandwidth)

    def seconds_of_many(
        self, shapes: Any, *, is_causal: bool, num_bytes: Any, peak: float, bandwidth: float
    ) -> np.ndarray[Any, Any]:
        """As ``seconds``, of shapes [calls, 4] and bytes [calls]."""
        count, rows, columns, width = np.moveaxis(np.asarray(shapes, dtype=float), -1, 0)
        down, across = np.ceil(rows / BLOCK), np.ceil(columns / BLOCK)
        square = np.minimum(down, across)
        skipped = square * (square - 1) / 2 if is_causal else np.zeros_like(square)
        turns = count * (down * across - skipped) / self.processors
        occupied = np.minimum(1.0, count * down / self.processors)
        steps = np.maximum(turns + self.tail * across * occupied, across)
        rate = self.sustained * self.rate * peak / self.processors
        arithmetic = steps * self.products * 4 * BLOCK**2 * width / rate
        memory = np.asarray(num_bytes, dtype=float) / (self.stream * bandwidth)
        power = self.sharpness
        together: np.ndarray[Any, Any] = (arithmetic**power + memory**power) ** (1 / power)
        return self.ramp + together


@lru_cache(maxsize=1 << 14)
def _seconds(
    kernel: AttentionKernel, shape: MatmulShape, is_causal: bool, num_bytes: float, peak: float, bandwidth: float
) -> float:
    return float(
        kernel.seconds_of_many(shape, is_causal=is_causal, num_bytes=num_bytes, peak=peak, bandwidth=bandwidth)
    )
