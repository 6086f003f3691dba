"""Gradients of tables that a model asks for as sparse tensors are dense ones of the same values.

Shards of them are gathered, reduced and clipped as any others; an optimizer for sparse gradients alone refuses them.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.canonicalise.fx import aten, calls
from passes.torch_compat.operators import schema

#: Operators that may give sparse gradients, with the argument that says so.
_ASKS_FOR_SPARSE: dict[Any, str] = {
    aten.embedding.default: "sparse",
    aten.embedding_bag.default: "sparse",
    aten.embedding_bag.padding_idx: "sparse",
    aten.gather.default: "sparse_grad",
}


def make_gradients_dense(module: fx.GraphModule) -> None:
    """Leave out that a gradient is to be sparse."""
    for node in calls(module.graph):
        name = _ASKS_FOR_SPARSE.get(node.target)
        if name is None:
            continue
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != name}
        place = [argument.name for argument in schema(node.target).arguments].index(name)
        if place < len(node.args) and node.args[place]:
            node.update_arg(place, False)
        if place == len(node.args) - 1:
            node.args = node.args[:-1]
