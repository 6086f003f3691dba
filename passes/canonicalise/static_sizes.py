"""Operators whose results have a size that depends on values, with the size that tracing was told.

``nonzero(mask)`` of n places becomes ``nonzero_static(mask, size=n)``; a mask as an index becomes its places;
``unique`` and ``bincount`` are written out. The graph's guards see to it that n is right.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from passes.canonicalise.fx import argument, aten, calls, insert, replace, shape, value
from passes.ir.errors import CaptureError


def fix_sizes(module: fx.GraphModule) -> None:
    """Rewrite every operator of the graph whose result's size depends on values.

    Raises:
        CaptureError: for one that has no form of static size.
    """
    for node in calls(module.graph, *_REWRITES):
        _REWRITES[node.target](node, functools.partial(_call, node))


#: Inserts a call of an operator before the node that is rewritten.
_Insert = Callable[..., fx.Node]


def _call(before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return insert(before, target, args, kwargs)


def _nonzero(node: fx.Node, call: _Insert) -> None:
    replace(node, call(aten.nonzero_static.default, node.args[0], size=shape(node)[0]))


def _where(node: fx.Node, call: _Insert) -> None:
    size = node.meta["val"][0].shape[0]
    _replace_items(node, dict(enumerate(_places(node.args[0], size, call))))


def _places(mask: Any, size: int, call: _Insert) -> list[fx.Node]:
    """Where a mask is true: one tensor of indices for each of its dims."""
    places = call(aten.nonzero_static.default, mask, size=size)
    return [call(aten.select.int, places, 1, dim) for dim in range(len(shape(mask)))]


def _index(node: fx.Node, call: _Insert) -> None:
    indices: list[Any] = list(node.args[1])  # type: ignore[arg-type]
    masks = [index for index in indices if index is not None and value(index).dtype in (torch.bool, torch.uint8)]
    if not masks:
        return
    others = [index for index in indices if index is not None and index not in masks]
    if len(masks) > 1 or any(math.prod(shape(index)) != 1 for index in others):
        raise CaptureError(
            "a mask is an index beside other tensors of indices, which has no form of static size: take mask.nonzero() "
            "and index with its columns"
        )
    tensors = [place for place, index in enumerate(indices) if index is not None]
    is_together = tensors[-1] - tensors[0] + 1 == len(tensors)
    size = shape(node)[tensors[0] if is_together else 0]
    written_out: list[Any] = []
    for index in indices:
        written_out += _places(index, size, call) if index in masks and index is not None else [index]
    replace(node, call(aten.index.Tensor, node.args[0], written_out))


def _masked_select(node: fx.Node, call: _Insert) -> None:
    source, mask = node.args
    sizes = list(torch.broadcast_shapes(shape(source), shape(mask)))  # type: ignore[arg-type]
    spread = call(aten.expand.default, mask, sizes)
    places = _places(spread, shape(node)[0], call)
    replace(node, call(aten.index.Tensor, call(aten.expand.default, source, sizes), places))


def _repeat_interleave(node: fx.Node, call: _Insert) -> None:
    """The size goes to whatever repeats: ``x.repeat_interleave(repeats)`` asks for it in a node of its own or not."""
    if argument(node, "output_size") is None:
        dim = argument(node, "dim")
        size = shape(node)[0 if dim is None else dim]
        if node.target is aten.repeat_interleave.Tensor:
            replace(node, call(node.target, node.args[0], output_size=size))
        else:
            replace(node, call(node.target, node.args[0], node.args[1], dim, output_size=size))


def _bincount(node: fx.Node, call: _Insert) -> None:
    numbers, weights = node.args[0], argument(node, "weights")
    zeros = call(aten.new_zeros.default, numbers, [shape(node)[0]], dtype=value(node).dtype)
    if weights is None:
        amounts = call(aten.ones_like.default, numbers)
    else:
        amounts = call(aten.to.dtype, weights, value(node).dtype)
    indices = call(aten.to.dtype, numbers, torch.int64)
    replace(node, call(aten.scatter_add.default, zeros, 0, indices, amounts))


def _unique(node: fx.Node, call: _Insert) -> None:
    """With s = sort(x): s where it differs from the entry before; groups are counted along s."""
    source = node.args[0]
    flat = call(aten.reshape.default, source, [-1])
    if node.target is aten.unique_consecutive.default:
        if argument(node, "dim") is not None:
            _refuse_dim(node, call)
        ordered, order = flat, None
    else:
        in_order = call(aten.sort.stable, flat, stable=True)
        ordered, order = call(operator.getitem, in_order, 0), call(operator.getitem, in_order, 1)
    (count,), size = shape(flat), node.meta["val"][0].shape[0]
    if count == 0:
        raise CaptureError("unique of an empty tensor has no form of static size")
    later, earlier = call(aten.slice.Tensor, ordered, 0, 1, count), call(aten.slice.Tensor, ordered, 0, 0, count - 1)
    first = call(aten.new_ones.default, flat, [1], dtype=torch.bool)
    starts = call(aten.cat.default, [first, call(aten.ne.Tensor, later, earlier)], 0)
    (places,) = _places(starts, size, call)
    group = call(aten.sub.Tensor, call(aten.cumsum.default, starts, 0), 1)
    inverse = group if order is None else call(aten.scatter.src, call(aten.zeros_like.default, order), 0, order, group)
    counts = call(aten.new_zeros.default, group, [size])
    results = {
        0: call(aten.index.Tensor, ordered, [places]),
        1: call(aten.reshape.default, inverse, list(shape(source))),  # type: ignore[arg-type]
        2: call(aten.scatter_add.default, counts, 0, group, call(aten.ones_like.default, group)),
    }
    _replace_items(node, results)


def _refuse_dim(node: fx.Node, call: _Insert) -> None:
    raise CaptureError("torch.unique along a dim has no form of static size: take it of numbers, or outside of forward")


def _replace_items(node: fx.Node, results: dict[int, fx.Node]) -> None:
    """Put ``results`` in the place of what is taken out of a node of several results."""
    for user in list(node.users):
        replace(user, results[user.args[1]])  # type: ignore[index]
    node.graph.erase_node(node)


_REWRITES: dict[Any, Callable[[fx.Node, _Insert], None]] = {
    aten.nonzero.default: _nonzero,
    aten.argwhere.default: _nonzero,
    aten.where.default: _where,
    aten.nonzero_numpy.default: _where,
    aten.index.Tensor: _index,
    aten.masked_select.default: _masked_select,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten.repeat_interleave.self_Tensor: _repeat_interleave,
    aten.bincount.default: _bincount,
    aten._unique2.default: _unique,
    aten._unique.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.unique_dim.default: _refuse_dim,
}
