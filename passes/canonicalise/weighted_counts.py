"""Numbers added up by an id each, such as how many tokens that are no padding chose each expert, as a sum over rows.

``zeros(n).scatter_add(0, ids, numbers)`` needs all entries at once; ``(one_hot(ids, n) * numbers[:, None]).sum(0)`` is
a sum over samples, of which each rank and each micro-batch has a part. So is ``bincount``, which adds up ones.
"""

from __future__ import annotations

import torch
from torch import fx

from passes.canonicalise.fx import aten, calls, insert, replace, shape, value

_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
#: Most sums: each id becomes a row of so many entries.
_MOST = 1024


def sum_weighted_counts(module: fx.GraphModule) -> None:
    """Rewrite sums of few kinds of ids."""
    for node in calls(module.graph, aten.scatter_add.default):
        zeros, _, ids, numbers = node.args
        assert isinstance(zeros, fx.Node) and isinstance(ids, fx.Node) and isinstance(numbers, fx.Node)
        is_vector = len(shape(node)) == 1 and shape(ids) == shape(numbers) and shape(node)[0] <= _MOST
        if zeros.target in _ZEROS and is_vector and value(node).dtype != torch.bool:
            one_hot = insert(node, aten.one_hot.default, (ids, shape(node)[0]))
            rows = insert(node, aten.to.dtype, (one_hot, value(node).dtype))
            amounts = insert(node, aten.unsqueeze.default, (numbers, -1))
            product = insert(node, aten.mul.Tensor, (rows, amounts))
            replace(node, insert(node, aten.sum.dim_IntList, (product, [0])))
