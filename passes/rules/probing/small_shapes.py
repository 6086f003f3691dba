"""Small shapes in the pattern of a call: equal sizes stay equal, and what other arguments fix stays as it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from passes.rules.probing.probe_call import ProbeCall, Shapes
from passes.rules.probing.probe_samples import KINDS, draw, index_ranges, runs

#: Sizes that a probe uses, in the order of the call's own: all can be halved.
SMALL_SIZES = (4, 6, 8, 10, 12, 14, 16, 18, 20, 22)
#: Numbers that all tensors of a probe may have together, and ways to shrink that are tried.
_MAX_NUMBERS = 2**15
_MAX_TRIALS = 64
#: Largest size of a dim that is cut in a probe.
MAX_PROBED_SIZE = 1536
#: Largest whole ratio between two sizes that is kept (four gates of a hidden dim).
_MAX_RATIO = 8


def small_shapes(call: ProbeCall, shapes: Shapes) -> Shapes | None:
    """Shapes for ``call`` in the pattern of ``shapes`` that it takes and runs quickly; None if there are none."""
    sizes = sorted({size for shape in shapes for size in shape if size > 1})
    for mapping in itertools.islice(_mappings(sizes), _MAX_TRIALS):
        small = tuple(tuple(mapping.get(size, size) for size in shape) for shape in shapes)
        if sum(map(math.prod, small)) <= _MAX_NUMBERS and takes(call, small):
            return small
    return None


def nearly_full_size(shapes: Shapes, small: Shapes, dims: tuple[int | None, ...], piece: int) -> Shapes | None:
    """``small`` with ``dims`` (of each tensor the dim, or None) as large as in ``shapes``, in an even number of pieces.

    A number hidden in an operator's code (a window of 128) shows in dims that are larger alone. At most
    ``MAX_PROBED_SIZE``; None where that is no more than ``small`` has.
    """
    size = next(shape[dim] for shape, dim in zip(shapes, dims) if dim is not None)
    before = next(shape[dim] for shape, dim in zip(small, dims) if dim is not None)
    largest = min(size, MAX_PROBED_SIZE) // (2 * piece) * (2 * piece)
    resized = tuple(
        shape if dim is None else (*shape[:dim], largest, *shape[dim + 1 :]) for shape, dim in zip(small, dims)
    )
    return resized if largest > before else None


def takes(call: ProbeCall, shapes: Shapes) -> bool:
    """Whether the operator runs on tensors of these shapes, with any of the inputs that a probe has."""
    high = index_ranges(call, shapes)[-1]
    return any(runs(call, draw(call, shapes, kind, high)) for kind in KINDS)


def _mappings(sizes: list[int]) -> Iterator[Mapping[int, int]]:
    """Size → small size: as many shrunk as possible first, ratios between sizes ignored, then kept."""
    if len(sizes) > len(SMALL_SIZES):
        yield {size: size for size in sizes}
        return
    for num_fixed in range(len(sizes) + 1):
        for fixed in itertools.combinations(sizes, num_fixed):
            free = [size for size in sizes if size not in fixed]
            small = iter(size for size in SMALL_SIZES if size not in fixed)
            yield {**{size: size for size in fixed}, **{size: next(small) for size in free}}
            proportional = _proportional(free, fixed)
            if proportional is not None:
                yield {**{size: size for size in fixed}, **proportional}


def _proportional(sizes: list[int], fixed: tuple[int, ...]) -> dict[int, int] | None:
    """Small sizes with the ratio that each size has to a smaller one; None if none has any."""
    small = iter(size for size in SMALL_SIZES if size not in fixed)
    mapping: dict[int, int] = {}
    related = False
    for size in sizes:
        base = next((other for other in reversed(mapping) if size % other == 0 and size // other <= _MAX_RATIO), None)
        related = related or base is not None
        mapping[size] = next(small) if base is None else mapping[base] * (size // base)
    return mapping if related else None
