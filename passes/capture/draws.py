"""Random operators of a graph: each gets a number, from which (with the seed and the step) it draws under any plan."""

from __future__ import annotations

import dataclasses

import torch

from passes.capture.interpret import operator
from passes.ir.graph import Graph, Node
from passes.rules.call import bind

#: Operators that draw only where this argument is not zero.
_PROBABILITY = {"aten.scaled_dot_product_attention.default": "dropout_p", "aten.dropout.default": "p"}


def number_draws(graph: Graph) -> Graph:
    """``graph`` with its random operators numbered in order."""
    numbers = iter(range(len(graph.nodes)))
    nodes = (dataclasses.replace(node, draw=next(numbers) if _draws(node, graph) else None) for node in graph.nodes)
    return graph.replace(nodes=tuple(nodes))


def _draws(node: Node, graph: Graph) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(operator(node.op), "tags", ()):
        return False
    call = bind(node, graph.values)
    return call is None or node.op not in _PROBABILITY or bool(call.get(_PROBABILITY[node.op]))
