"""Which values share memory, and which of that memory is activations."""

from __future__ import annotations

from collections.abc import Collection

from passes.autograd.walk import Kernels, walk
from passes.ir.graph import Graph


def storage_roots(graph: Graph, nodes: Collection[str] | None = None, *, kernels: Kernels = "gpu") -> dict[str, str]:
    """Value name → name of the value whose memory it is: itself, or what it is a view of (views of views followed).

    Strides are followed, so a reshape is a view where torch makes it one and a copy where it must.

    Args:
        nodes: names of the nodes to look at; None for all. Values of other nodes are their own roots.
    """
    roots = {name: name for name in graph.values}
    for call in walk(graph, nodes, kernels=kernels):
        for value, source in zip(call.node.outputs, call.alias_of):
            if source is not None:
                roots[value.name] = roots[source]
    return roots


def activations(graph: Graph) -> frozenset[str]:
    """Names of the values that every step computes: outputs of nodes that depend on more than shapes and constants.

    Parameters, buffers, literals and graph inputs are not; nor are masks and positions, computed once for all steps.
    """
    return frozenset(value.name for node in graph.nodes if not node.constant for value in node.outputs)


def held_constants(graph: Graph) -> frozenset[str]:
    """Names of the values that depend on shapes alone and that other nodes take: computed once, held for all steps."""
    constants = {value.name for node in graph.nodes if node.constant for value in node.outputs}
    return frozenset(name for node in graph.nodes if not node.constant for name in node.inputs if name in constants)
