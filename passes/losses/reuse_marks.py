"""Mark cross-entropies that may write the gradient of their logits over the logits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from passes.autograd.logits_memory import reusable_logits
from passes.ir.graph import Graph


def with_logits_reused(graph: Graph, *, results: Collection[str]) -> Graph:
    """The graph for a program whose backward pass runs once, with ``reuse_logits`` wherever nobody else reads them.

    ``results`` are the values that come out of the program.
    """
    reusing = reusable_logits(graph, results=results)
    if not reusing:
        return graph
    return graph.replace(
        nodes=tuple(
            replace(node, kwargs={**node.kwargs, "reuse_logits": True}) if node.name in reusing else node
            for node in graph.nodes
        )
    )
