"""Embedding bags as a table look-up and a sum over each bag, so that the table's rows and columns may be cut.

With bags of one length L (two-dimensional input, or offsets 0, L, 2L, …) the indices are a rectangle [bags, L]:

    sum: Σ weight[index] · per_sample_weight      mean: Σ weight[index] / (indices that are not padding)     max

With other offsets a bag's rows are added into its place: bag(i) = the last b with offsets[b] <= i (sum and mean).
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from passes.canonicalise.fx import argument, aten, calls, insert, is_tensor, shape, value

_SUM, _MEAN, _MAX = 0, 1, 2


def write_out_embedding_bags(module: fx.GraphModule) -> None:
    for node in calls(module.graph, aten.embedding_bag.padding_idx, aten.embedding_bag.default):
        for user in [user for user in node.users if user.target is operator.getitem and not user.users]:
            node.graph.erase_node(user)
        users = list(node.users)
        if any(user.args[1:] != (0,) for user in users) or argument(node, "scale_grad_by_freq"):
            continue
        length = _bag_length(node)
        if length is None and argument(node, "mode") == _MAX:
            continue
        result = _ragged(node) if length is None else _rectangular(node, length)
        if result is not None:
            for user in users:
                user.replace_all_uses_with(result)
                user.graph.erase_node(user)
            node.graph.erase_node(node)


def _bag_length(node: fx.Node) -> int | None:
    """The length that all bags have, told from how the offsets are made; None if they are data."""
    indices, offsets = argument(node, "indices"), argument(node, "offsets")
    if offsets.target is aten.arange.start_step:
        start, stop, step = offsets.args[0], offsets.args[1], argument(offsets, "step")
        count = len(range(start, stop, step)) - bool(argument(node, "include_last_offset"))
        if start == 0 and count > 0 and count * step == shape(indices)[0]:
            return int(step)
    return None


def _rectangular(node: fx.Node, length: int) -> fx.Node | None:
    mode, padding = argument(node, "mode"), _padding(node)
    if mode == _MAX and padding >= 0:
        return None
    flat = argument(node, "indices")
    indices = _unflattened(node, flat, length)
    rows = insert(node, aten.embedding.default, (argument(node, "weight"), indices, padding))
    scale = _scale(node, indices, length)
    if scale is not None:
        rows = insert(node, aten.mul.Tensor, (rows, insert(node, aten.unsqueeze.default, (scale, -1))))
    if mode == _MAX:
        return insert(node, operator.getitem, (insert(node, aten.max.dim, (rows, 1)), 0))
    total = insert(node, aten.sum.dim_IntList, (rows, [1]))
    if mode == _SUM:
        return total
    if padding < 0:
        return insert(node, aten.div.Scalar, (total, float(length)))
    return _divided(node, total, insert(node, aten.sum.dim_IntList, (_counted(node, indices, padding), [1], True)))


def _ragged(node: fx.Node) -> fx.Node:
    """Rows added into the place of their bag."""
    weight, indices, offsets = (argument(node, name) for name in ("weight", "indices", "offsets"))
    padding = _padding(node)
    num_bags = shape(offsets)[0] - bool(argument(node, "include_last_offset"))
    places = insert(node, aten.arange.default, (shape(indices)[0],), {"dtype": value(offsets).dtype})
    after = insert(node, aten.searchsorted.Tensor, (offsets, places), {"right": True})
    bags = insert(node, aten.sub.Tensor, (after, 1))
    rows = insert(node, aten.embedding.default, (weight, indices, padding))
    scale = _scale(node, indices, None)
    if scale is not None:
        rows = insert(node, aten.mul.Tensor, (rows, insert(node, aten.unsqueeze.default, (scale, -1))))
    empty = _zeros(node, num_bags, shape(weight)[1], rows)
    total = insert(node, aten.index_add.default, (empty, 0, bags, rows))
    if argument(node, "mode") == _SUM:
        return total
    ones = insert(node, aten.unsqueeze.default, (_counted(node, indices, padding), -1))
    ones = insert(node, aten.to.dtype, (ones, value(rows).dtype))
    count = insert(node, aten.index_add.default, (_zeros(node, num_bags, 1, rows), 0, bags, ones))
    return _divided(node, total, count)


def _zeros(node: fx.Node, rows: int, columns: int, like: fx.Node) -> fx.Node:
    options = {"dtype": value(like).dtype, "device": value(like).device}
    return insert(node, aten.zeros.default, ([rows, columns],), options)


def _padding(node: fx.Node) -> int:
    padding = argument(node, "padding_idx")
    rows = shape(argument(node, "weight"))[0]
    return -1 if padding is None else padding % rows


def _unflattened(node: fx.Node, flat: fx.Node, length: int) -> fx.Node:
    """The rectangle of indices: what was flattened, where that has the shape."""
    size = (shape(flat)[0] // length, length)
    source = flat.args[0] if flat.target in (aten.reshape.default, aten.view.default) else None
    if isinstance(source, fx.Node) and is_tensor(source) and shape(source) == size:
        return source
    return insert(node, aten.reshape.default, (flat, list(size)))


def _scale(node: fx.Node, indices: fx.Node, length: int | None) -> fx.Node | None:
    """Weights of the samples and, with padding, 0 where that is."""
    scale: Any = argument(node, "per_sample_weights")
    if scale is not None and length is not None:
        scale = _unflattened(node, scale, length)
    padding = _padding(node)
    if padding < 0:
        return scale  # type: ignore[no-any-return]
    counted = _counted(node, indices, padding)
    return counted if scale is None else insert(node, aten.mul.Tensor, (scale, counted))


def _counted(node: fx.Node, indices: fx.Node, padding: int) -> fx.Node:
    """Whether each index counts."""
    return insert(node, aten.ne.Scalar, (indices, padding))


def _divided(node: fx.Node, total: fx.Node, count: fx.Node) -> fx.Node:
    """The mean of each bag; 0 of an empty one."""
    return insert(node, aten.div.Tensor, (total, insert(node, aten.clamp_min.default, (count, 1))))
