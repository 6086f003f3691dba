"""Logits that only cross-entropy reads: the backward pass may write their gradient over them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from passes.autograd.operator_tables import base_name, is_view
from passes.autograd.saved import kept_by_autograd
from passes.ir.graph import Graph, Node

CROSS_ENTROPY = "meshwright.cross_entropy"
#: Operators beside views that may give their input back.
_MAY_ALIAS = frozenset(("aten.contiguous", "aten.to", "aten.type_as", "aten.dropout", "aten.expand"))


def reusable_logits(graph: Graph, *, results: Collection[str]) -> frozenset[str]:
    """Names of the cross-entropies whose logits nobody else reads, forward or backward.

    ``results`` are the values that come out of the graph.
    """
    losses = [node for node in graph.nodes if node.op == CROSS_ENTROPY and node.output.requires_grad]
    if not losses:
        return frozenset()
    maker = {value.name: node for node in graph.nodes for value in node.outputs}
    users: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in dict.fromkeys(node.inputs):
            users.setdefault(name, []).append(node)
    return frozenset(node.name for node in losses if _is_alone(graph, node, maker, users, results))


def _is_alone(
    graph: Graph,
    loss: Node,
    maker: Mapping[str, Node],
    users: Mapping[str, Sequence[Node]],
    results: Collection[str],
) -> bool:
    """Whether a single chain of views leads from the node that allocates the logits to ``loss``."""
    values, reader, name = graph.values, loss, loss.inputs[0]
    num_elements = values[name].num_elements
    while True:
        if users[name] != [reader] or name in results or reader.inputs.count(name) > 1:
            return False
        node = maker.get(name)
        if node is None or node.constant or values[name].num_elements != num_elements:
            return False
        if not _may_alias(node, graph):
            return len(node.outputs) == 1 and not _keeps(graph, node, name)
        reader, name = node, node.inputs[0]


def _may_alias(node: Node, graph: Graph) -> bool:
    if base_name(node.op) in ("aten.to", "aten.type_as"):
        return graph.values[node.inputs[0]].dtype == node.output.dtype
    return is_view(node) or base_name(node.op) in _MAY_ALIAS


def _keeps(graph: Graph, node: Node, name: str) -> bool:
    """Whether the backward of ``node`` reads its output ``name`` (as that of a tanh does)."""
    return name in kept_by_autograd(graph, frozenset((node.name,)), (node.name,))[node.name].values
