"""Where a rectangle of a row-major tensor lies in a file: runs of neighbouring elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence


def runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, Iterator[int]]:
    """Elements in a run, and the first element of each, in the order in which the rectangle holds them.

    ``shape`` is that of the whole tensor; the rectangle starts at ``offsets`` and is ``sizes`` large.
    """
    if math.prod(sizes) == 0:
        return 0, iter(())
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # Dims from `inner` on are whole, so they and the dim before them lie in one run.
    inner = len(shape)
    while inner > 0 and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    cut = max(inner - 1, 0)
    length = math.prod(sizes[cut:])
    base = sum(offset * stride for offset, stride in zip(offsets, strides))
    places = itertools.product(*(range(size) for size in sizes[:cut]))
    return length, (base + sum(place * stride for place, stride in zip(at, strides)) for at in places)
