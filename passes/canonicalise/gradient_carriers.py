"""Which nodes carry a gradient."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

#: Operators whose floating-point output carries no gradient to their inputs.
_CUT = frozenset({
    "detach", "lift_fresh", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    "randint_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", "bernoulli", "one_hot",
    "histc", "bincount", "searchsorted", "bucketize", "multinomial", "nextafter",
})  # fmt: skip


def nodes_with_gradient(graph: fx.Graph, sources: Collection[str]) -> set[fx.Node]:
    """Nodes that depend on one of the placeholders named in ``sources`` by differentiable operators."""
    carrying: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            carries = node.name in sources
        else:
            carries = (
                node.op == "call_function" and not carrying.isdisjoint(node.all_input_nodes) and passes_gradient(node)
            )
        if carries:
            carrying.add(node)
    return carrying


def differentiable(entry: object) -> bool:
    return isinstance(entry, torch.Tensor) and (entry.is_floating_point() or entry.is_complex())


def passes_gradient(node: fx.Node) -> bool:
    """Whether the node's output carries a gradient to inputs that have one."""
    entry = node.meta.get("val")
    entries = entry if isinstance(entry, (list, tuple)) else [entry]
    name = str(node.target).split(".")
    return any(map(differentiable, entries)) and not (len(name) > 1 and name[1] in _CUT)
