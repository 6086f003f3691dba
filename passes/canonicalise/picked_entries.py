"""Look-ups that pick entries row by row: ``x[torch.arange(len(x)), picks]`` as ``gather``, which keeps the rows apart.

The label's score of each sample, the last token of each text, a mark at one class of each row: as a look-up they ask
for all samples at once, so that a batch is one micro-batch and every rank needs the whole of it. Of the indices all but
one count the rows of their dim, each along a dim of its own. With rows b, t counted and picks j,

    x[b, t, j[b, t, …]]                ->  gather(x, 2, j)
    x[b, t, j[b, t, …]] = v[b, t, …]   ->  scatter(x, 2, j, v), and scatter_add where entries are added up
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.canonicalise.bounded_ids import bound_of_ids
from passes.canonicalise.counting_indices import counting
from passes.canonicalise.fx import argument, aten, calls, insert, is_tensor, replace, shape, value


@dataclass(frozen=True)
class _Picks:
    """What a look-up with several indices, one behind the other, takes.

    Attributes:
        first: dim of the first index.
        rows: for each index the dim of the looked-up shape that it counts along; None for the one that picks.
        picked: the index that picks.
        looked_up: the shape of all indices together.
    """

    first: int
    rows: tuple[int | None, ...]
    picked: fx.Node
    looked_up: tuple[int, ...]

    @property
    def dim(self) -> int:
        """The dim that entries are picked along."""
        return self.first + self.rows.index(None)

    @property
    def free(self) -> list[int]:
        """The dims of the looked-up shape that no index counts along."""
        return [place for place in range(len(self.looked_up)) if place not in self.rows]

    @property
    def count(self) -> int:
        """How many entries are picked of each row."""
        return math.prod(self.looked_up[place] for place in self.free)

    @property
    def order(self) -> list[int]:
        """The dims of the looked-up shape in the order of the table's: the free ones where entries are picked."""
        return [place for row in self.rows for place in (self.free if row is None else [row])]


def gather_picked_entries(module: fx.GraphModule) -> None:
    for node in calls(module.graph, aten.index.Tensor):
        picks = _picks(node)
        if picks is not None:
            replace(node, _gathered(node, picks))
    for node in calls(module.graph, aten.index_put.default):
        picks = _picks(node)
        if picks is not None and argument(node, "values").meta["val"].dtype == value(node).dtype:
            replace(node, _scattered(node, picks))


def _picks(node: fx.Node) -> _Picks | None:
    table: Any = node.args[0]
    entries: Any = node.args[1]
    first = next((dim for dim, entry in enumerate(entries) if entry is not None), 0)
    indices = entries[first:]
    if len(indices) < 2 or not all(isinstance(index, fx.Node) and _is_index(index) for index in indices):
        return None
    looked_up = tuple(torch.broadcast_shapes(*map(shape, indices)))
    sizes = shape(table)[first : first + len(indices)]
    rows = [_row_dim(index, looked_up, size) for index, size in zip(indices, sizes)]
    counted = [row for row in rows if row is not None]
    if rows.count(None) != 1 or len(set(counted)) < len(counted):
        return None
    return _Picks(first, tuple(rows), indices[rows.index(None)], looked_up)


def _is_index(index: fx.Node) -> bool:
    return is_tensor(index) and value(index).dtype in (torch.int64, torch.int32)


def _row_dim(index: fx.Node, looked_up: tuple[int, ...], size: int) -> int | None:
    """The dim of the looked-up shape along which ``index`` counts all rows of a dim of ``size``."""
    form = counting(index)
    if form is None or (form.start, form.divisor) != (0, 1) or size == 1:
        return None
    behind = len(looked_up) - len(form.strides)
    steps = {behind + dim: step for dim, (step, length) in enumerate(zip(form.strides, shape(index))) if length > 1}
    steps = {dim: step for dim, step in steps.items() if step}
    (dim, step) = next(iter(steps.items()), (0, 0))
    return dim if len(steps) == 1 and step == 1 and looked_up[dim] == size else None


def _gathered(node: fx.Node, picks: _Picks) -> fx.Node:
    table: Any = node.args[0]
    entries = insert(node, aten.gather.default, (table, picks.dim, _places(node, picks)))
    sizes = shape(table)
    ordered = [picks.looked_up[place] for place in picks.order]
    behind = sizes[picks.first + len(picks.rows) :]
    entries = _reshaped(node, entries, [*sizes[: picks.first], *ordered, *behind])
    back = [picks.order.index(place) for place in range(len(picks.order))]
    return _permuted(node, entries, picks.first, back)


def _scattered(node: fx.Node, picks: _Picks) -> fx.Node:
    table: Any = node.args[0]
    places = _places(node, picks)
    sizes = shape(table)
    behind = sizes[picks.first + len(picks.rows) :]
    whole = [*sizes[: picks.first], *picks.looked_up, *behind]
    values: Any = argument(node, "values")
    if list(shape(values)) != whole:
        values = insert(node, aten.expand.default, (values, whole))
    values = _reshaped(node, _permuted(node, values, picks.first, picks.order), list(shape(places)))
    adds = argument(node, "accumulate", False)
    operator = aten.scatter_add.default if adds else aten.scatter.src
    return insert(node, operator, (table, picks.dim, places, values))


def _places(node: fx.Node, picks: _Picks) -> fx.Node:
    """The picks as ``gather`` takes them: as many dims as the table, none negative."""
    table: Any = node.args[0]
    sizes = list(shape(table))
    places = _from_the_front(node, picks.picked, sizes[picks.dim])
    if value(places).dtype != torch.int64:
        places = insert(node, aten.to.dtype, (places, torch.int64))
    if shape(places) != picks.looked_up:
        places = insert(node, aten.expand.default, (places, list(picks.looked_up)))
    sizes[picks.dim] = picks.count
    behind = len(picks.rows) + picks.first
    places = _permuted(node, places, 0, picks.order)
    own = [size if picks.first <= dim < behind else 1 for dim, size in enumerate(sizes)]
    places = _reshaped(node, places, own)
    return places if own == sizes else insert(node, aten.expand.default, (places, sizes))


def _from_the_front(node: fx.Node, picked: fx.Node, size: int) -> fx.Node:
    """Indices of which those below zero, which count from the end, are written from the front."""
    if bound_of_ids(picked) is not None:
        return picked
    is_negative = insert(node, aten.lt.Scalar, (picked, 0))
    return insert(node, aten.where.self, (is_negative, insert(node, aten.add.Tensor, (picked, size)), picked))


def _permuted(node: fx.Node, tensor: fx.Node, first: int, order: list[int]) -> fx.Node:
    """``tensor`` with the dims behind the first ones in another order."""
    if order == list(range(len(order))):
        return tensor
    last = range(first + len(order), len(shape(tensor)))
    dims = [*range(first), *(first + place for place in order), *last]
    return insert(node, aten.permute.default, (tensor, dims))


def _reshaped(node: fx.Node, tensor: fx.Node, sizes: list[int]) -> fx.Node:
    return tensor if list(shape(tensor)) == sizes else insert(node, aten.reshape.default, (tensor, sizes))
