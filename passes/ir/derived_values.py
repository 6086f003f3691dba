"""Values of a graph that depend on its states alone."""

from __future__ import annotations

from passes.ir.graph import Graph


def state_derived(graph: Graph) -> frozenset[str]:
    """Names of parameters, buffers, and of what is computed from them and from constants alone.

    Such are casts and views of weights, and embeddings of positions that all samples have in common.
    """
    derived = {state.value.name for state in graph.states}
    constants = {value.name for node in graph.nodes if node.constant for value in node.outputs}
    for node in graph.nodes:
        rest = [name for name in node.inputs if name not in constants]
        if rest and all(name in derived for name in rest):
            derived.update(value.name for value in node.outputs)
    return frozenset(derived)
