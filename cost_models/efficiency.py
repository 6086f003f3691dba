"""What share of its peak a device reaches, by kind and size of the work.

Two properties hold for every curve (they are checked where curves are read) and every tiling, since the search's
bounds rest on them: more work never takes less time, and one of n parts never takes less than 1/n of the whole.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from cost_models.attention_kernel import AttentionKernel
from cost_models.dtypes import TFLOAT32, item_size
from cost_models.matmul_kernel import MatmulKernel, MatmulShape

#: Kinds of work, and whose curves stand in where a device has none for a kind (None: the full peak).
KIND_STAND_IN: dict[str, str | None] = {
    "matmul": None,
    "convolution": "matmul",
    "attention": "matmul",
    "attention_backward": "attention",
    # with a mask that is a tensor
    "masked_attention": "attention",
    "masked_attention_backward": "attention_backward",
    # with a mask that has a gradient, which no other kernel than torch's memory-efficient one gives
    "biased_attention": "attention",
    "biased_attention_backward": "attention_backward",
    "elementwise": None,
    "norm": "elementwise",
    "reduction": "elementwise",
    "gather": "elementwise",
    "copy": "elementwise",
    "fused_elementwise": "elementwise",
    "fused_norm": "norm",
    "optimizer": "elementwise",
    # many tensors of a model at once, into or out of a flat buffer
    "list_copy": "copy",
    # what a collective takes or brings, laid out along a dim that is not the first
    "exchange_copy": "copy",
}

#: Kinds of which the shape, as a matmul's, decides how well tiles fill the device.
TILED_KINDS = frozenset({"matmul", "convolution"})
#: Bytes of the elements whose rows can start where no wide load may (other kernels multiply wider ones), and how many
#: of them the widest load has: rows of a multiple of as many are as fast as any.
NARROW_ITEM_SIZE, ANY_ROWS = 2, 8
#: As many elements of a product in TF32: it takes them as tensor cores do.
TF32_ROWS = 4
#: Kinds that fused attention runs, forward and backward.
ATTENTION_KINDS = frozenset({"attention", "attention_backward"})


@dataclass(frozen=True)
class Curve:
    """Efficiency in (0, 1] by size, linear in the logarithm of the size between points, constant outside them.

    Args:
        points: (size, efficiency), sizes ascending; a single point is a constant.

    Raises:
        ValueError: if points are out of order or out of range, if efficiency falls with size (a part would run
            faster than its share), or rises faster than size (more work would take less time).
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("an efficiency curve needs at least one point")
        for size, efficiency in self.points:
            if not (0 < size < math.inf and 0 < efficiency <= 1):
                raise ValueError(
                    f"a point needs a size above 0 and an efficiency in (0, 1], got [{size}, {efficiency}]"
                )
        for (small, low), (large, high) in zip(self.points, self.points[1:]):
            if large <= small:
                raise ValueError(f"sizes must ascend, got {small:g} before {large:g}")
            if high < low:
                raise ValueError(
                    f"efficiency must not fall with size, got {low:g} at {small:g} and {high:g} at {large:g}:"
                    " half the work would take less than half the time"
                )
            if high - low > low * math.log(large / small):
                raise ValueError(
                    f"efficiency rises too fast from {low:g} at {small:g} to {high:g} at {large:g}: more work would"
                    " take less time; move the points apart or raise the first"
                )

    @staticmethod
    def constant(efficiency: float) -> Curve:
        return Curve(((1.0, efficiency),))

    def __call__(self, size: float) -> float:
        """Efficiency at ``size``."""
        index = bisect_right(self.points, (size, math.inf))
        if index == 0:
            return self.points[0][1]
        if index == len(self.points):
            return self.points[-1][1]
        (small, low), (large, high) = self.points[index - 1], self.points[index]
        return low + (high - low) * math.log(size / small) / math.log(large / small)


FULL = Curve.constant(1.0)


@dataclass(frozen=True)
class Tiling:
    """How a matmul is cut into tiles that the device's processors work on in waves.

    A kernel computes its output in tiles of a fixed shape, each on one multiprocessor: tiles that overhang the matrix
    (tile quantisation) and processors that idle in the last wave (wave quantisation) cost as much as full ones. Source:
    "Matrix Multiplication Background User's Guide", NVIDIA, sections 2.3 and 3. The library picks the best of several
    tile shapes; smaller ones reach a smaller share of the rate, since they read more bytes for each operation.

    Attributes:
        processors: tiles that run at once.
        shapes: (rows, columns, share of the rate that such tiles reach), either way round.
        depth_overhead: filling and emptying a tile's pipeline costs as much as so many steps along k.
    """

    processors: int
    shapes: tuple[tuple[int, int, float], ...]
    depth_overhead: float = 0.0

    def overhead(self, shape: MatmulShape) -> float:
        """Work that the device is busy for, over the work that the shape asks for: at least 1."""
        batch, m, n, k = shape
        if not batch * m * n * k:
            return 1.0
        padded = min(
            math.ceil(batch * math.ceil(m / height) * math.ceil(n / width) / self.processors) * height * width / rate
            for rows, columns, rate in self.shapes
            for height, width in ((rows, columns), (columns, rows))
        )
        return padded * self.processors * (k + self.depth_overhead) / (batch * m * n * k)


@dataclass(frozen=True)
class Efficiency:
    """Of one kind of work: share of the peak rate by operations, share of memory bandwidth by bytes, tiling.

    ``kernel`` says all that at once of products whose shape is known; the others are for those whose shape is not.
    ``odd_rows`` is the share of the rate that is left where rows of a product's matrices have an odd number of elements
    of two bytes: these do not start where a wide load may, so they are read element by element ("Matrix Multiplication
    Background User's Guide", NVIDIA, section 2.2). ``narrow_rows`` is that of rows of an even number of them that is no
    multiple of ``ANY_ROWS``: kernels that copy whole tiles take only that, and older ones run instead.
    ``narrow_tf32_rows`` is that of products in TF32 whose rows are no multiple of the same 16 bytes (4 elements).
    """

    flops: Curve = FULL
    bytes: Curve = FULL
    tiling: Tiling | None = None
    kernel: MatmulKernel | AttentionKernel | None = None
    odd_rows: float = 1.0
    narrow_rows: float = 1.0
    narrow_tf32_rows: float = 1.0

    def rate_of_rows(self, row_step: int, dtype: str) -> float:
        """The share of the rate that is left of products in ``dtype`` whose rows are multiples of ``row_step``."""
        if dtype == TFLOAT32:
            return 1.0 if row_step >= TF32_ROWS else self.narrow_tf32_rows
        if item_size(dtype) != NARROW_ITEM_SIZE or row_step >= ANY_ROWS:
            return 1.0
        return self.odd_rows if row_step == 1 else self.narrow_rows

    def busy_flops(self, flops: float, *, shape: MatmulShape | None) -> float:
        """``flops`` at full rate that take as long as ``flops`` at the rate that is reached."""
        if shape is not None and self.tiling is not None:
            flops *= self.tiling.overhead(shape)
        return flops / self.flops(flops)

    def busy_bytes(self, num_bytes: float) -> float:
        """Bytes at full bandwidth that take as long as ``num_bytes`` at the bandwidth that is reached."""
        return num_bytes / self.bytes(num_bytes)


PERFECT = Efficiency()


def of_kind(table: Mapping[str, Efficiency], kind: str) -> Efficiency:
    """The efficiency of ``kind``, or of the kind that stands in for it; full peak if neither is in the table.

    Raises:
        ValueError: if the kind is not known.
    """
    if kind not in KIND_STAND_IN:
        raise ValueError(f"unknown kind of work {kind!r}: expected one of {', '.join(KIND_STAND_IN)}")
    current: str | None = kind
    while current is not None:
        if current in table:
            return table[current]
        current = KIND_STAND_IN[current]
    return PERFECT
