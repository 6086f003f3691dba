"""What may be cut together in an operator's inputs: one dim in each of some tensors, all of one size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from passes.ir.types import R, SpmdType, shard
from passes.rules.probing.probe_call import ProbeCall, Shapes

#: Sets that are tried for one dim before it is left whole.
_MAX_SETS = 400
_MAX_TENSORS = 5


@dataclass(frozen=True)
class CandidateCut:
    """Dims that are cut together: for each input the dim, or None."""

    dims: tuple[int | None, ...]

    def types(self) -> tuple[SpmdType, ...]:
        return tuple(R if dim is None else shard(dim) for dim in self.dims)

    def resized(self, shapes: Shapes, size: int) -> Shapes:
        """``shapes`` with ``size`` in the place of every dim of the set."""
        return tuple(
            shape if dim is None else (*shape[:dim], size, *shape[dim + 1 :]) for shape, dim in zip(shapes, self.dims)
        )

    def size(self, shapes: Shapes) -> int:
        return next(shape[dim] for shape, dim in zip(shapes, self.dims) if dim is not None)


def candidate_cuts(call: ProbeCall, shapes: Shapes, tensor: int, dim: int) -> Iterator[CandidateCut]:
    """Sets with ``dim`` of input ``tensor``, the smaller ones first.

    Tensors of one list argument that have one shape are cut alike.
    """
    groups = _groups(call, shapes)
    size = shapes[tensor][dim]
    own = next(group for group in groups if tensor in group)
    others = []
    for group in groups:
        dims = [place for place, other in enumerate(shapes[group[0]]) if other == size]
        if group is not own and dims:
            others.append([(group, place) for place in dims])
    sets = (
        combination
        for count in range(min(len(others), _MAX_TENSORS) + 1)
        for chosen in itertools.combinations(others, count)
        for combination in itertools.product(*chosen)
    )
    for combination in itertools.islice(sets, _MAX_SETS):
        yield _cut(len(shapes), [(own, dim), *combination])


def _groups(call: ProbeCall, shapes: Shapes) -> list[tuple[int, ...]]:
    """Inputs by number, those of one list argument with one shape together."""
    by_slot: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for number, (slot, shape) in enumerate(zip(call.slots, shapes)):
        by_slot.setdefault((slot, shape), []).append(number)
    return [tuple(numbers) for numbers in by_slot.values()]


def _cut(num_inputs: int, chosen: Sequence[tuple[tuple[int, ...], int]]) -> CandidateCut:
    dims: list[int | None] = [None] * num_inputs
    for group, dim in chosen:
        for number in group:
            dims[number] = dim
    return CandidateCut(tuple(dims))
