"""Which operators a gradient comes back to, and which values autograd keeps for it."""

from __future__ import annotations

from passes.ir.graph import Graph
from planner.sharding_ilp.sharding_prices import is_view, saves_inputs


def live_nodes(graph: Graph) -> frozenset[str]:
    """Names of the nodes that the gradient of the loss (without a loss: of any output) passes through."""
    values = graph.values
    needed = {name for path, name in graph.outputs.items() if graph.loss is None or path == graph.loss}
    live = set()
    for node in reversed(graph.nodes):
        if any(value.requires_grad and value.name in needed for value in node.outputs):
            live.add(node.name)
            needed.update(name for name in node.inputs if values[name].requires_grad)
    return frozenset(live)


def saved_values(graph: Graph, live: frozenset[str]) -> frozenset[str]:
    """Names of the values that the backward pass needs again, itself or through a view of it.

    An operator with a gradient keeps all its floating-point inputs, or (softmax, exp) its output in their place;
    additions, reductions and copies keep nothing. Integer tensors are left out: they are small.
    """
    values = graph.values
    saved: set[str] = set()
    for node in reversed(graph.nodes):
        keeps = (
            any(value.name in saved for value in node.outputs)
            if is_view(node)
            else node.name in live and saves_inputs(node)
        )
        if keeps:
            saved.update(name for name in node.inputs if "float" in values[name].dtype)
    return frozenset(saved)
