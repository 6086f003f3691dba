"""Look-ups whose indices count the rows one after the other, as views.

Masks are often spelled so: ``mask[samples[:, None], positions[None, :]]`` with two ``arange``. As a look-up it asks for
all samples at once; as a view it keeps them apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.canonicalise.counting_indices import counting
from passes.canonicalise.fx import aten, calls, insert, replace, shape


@dataclass(frozen=True)
class _Range:
    """The rows ``start … start + length - 1`` of a dim, along dim ``place`` of the result (None: one row, no dim)."""

    start: int
    length: int
    place: int | None


def view_counted_lookups(module: fx.GraphModule) -> None:
    """Replace ``source[i, j, …]`` by a view where each index counts along a dim of its own."""
    for node in calls(module.graph, aten.index.Tensor):
        ranges = _ranges(node)
        if ranges is not None:
            replace(node, _view(node, ranges))


def _ranges(node: fx.Node) -> list[_Range] | None:
    """What each index of a look-up takes; None if one of them takes something else."""
    source: Any = node.args[0]
    indices: Any = node.args[1]
    if not indices or not all(isinstance(index, fx.Node) for index in indices):
        return None
    looked_up = torch.broadcast_shapes(*(shape(index) for index in indices))
    ranges = [_range(index, looked_up, rows) for index, rows in zip(indices, shape(source))]
    places = [each.place for each in ranges if each is not None and each.place is not None]
    if None in ranges or len(set(places)) < len(places):
        return None
    return [each for each in ranges if each is not None]


def _range(index: fx.Node, looked_up: tuple[int, ...], rows: int) -> _Range | None:
    form = counting(index)
    if form is None or form.divisor != 1:
        return None
    first = len(looked_up) - len(form.strides)
    steps = {first + dim: step for dim, (step, size) in enumerate(zip(form.strides, shape(index))) if step and size > 1}
    if len(steps) > 1 or any(step != 1 for step in steps.values()):
        return None
    place = next(iter(steps), None)
    length = 1 if place is None else looked_up[place]
    return _Range(form.start, length, place) if 0 <= form.start <= rows - length else None


def _view(node: fx.Node, ranges: list[_Range]) -> fx.Node:
    """The view of ``ranges``, inserted before ``node``."""
    part: Any = node.args[0]
    for dim in reversed(range(len(ranges))):
        start, length = ranges[dim].start, ranges[dim].length
        if ranges[dim].place is None:
            part = insert(node, aten.select.int, (part, dim, start))
        elif length < shape(part)[dim]:
            part = insert(node, aten.slice.Tensor, (part, dim, start, start + length))
    places = [each.place for each in ranges if each.place is not None]
    order = sorted(range(len(places)), key=places.__getitem__)
    if order != list(range(len(places))):
        part = insert(node, aten.permute.default, (part, [*order, *range(len(places), len(shape(part)))]))
    for dim in range(len(shape(node)) - (len(shape(part)) - len(places))):
        if dim not in places:
            part = insert(node, aten.unsqueeze.default, (part, dim))
    if shape(part) != shape(node):
        part = insert(node, aten.expand.default, (part, list(shape(node))))
    return part  # type: ignore[no-any-return]
