"""Writes of buffers right behind what they write, so that a pipeline's cut leaves both in one chunk."""

from __future__ import annotations

from passes.ir.graph import Graph, Node


def with_early_stores(graph: Graph) -> Graph:
    """``graph`` with each write of a buffer behind the operator that makes its content, not at the end.

    For programs that read a buffer before they write it, or what was written; as caches of keys and values are.
    """
    makers = {value.name: node.name for node in graph.nodes for value in node.outputs}
    behind: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.writes_buffer and node.inputs[1] in makers:
            behind.setdefault(makers[node.inputs[1]], []).append(node)
    moved = {node.name for nodes in behind.values() for node in nodes}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name not in moved:
            nodes += [node, *behind.get(node.name, ())]
    return graph.replace(nodes=tuple(nodes))
