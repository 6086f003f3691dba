"""Random operators of a graph: each gets a number, from which (with the seed and the step) it draws under any plan."""

from __future__ import annotations

import dataclasses

import torch

from passes.capture.interpret import operator
from passes.ir.graph import Graph, Node
from passes.rules.operator_call import bind

#: Arguments of operators that draw only where none of these is False or zero.
_SWITCHES = ("train", "training", "dropout", "dropout_p")


def number_draws(graph: Graph) -> Graph:
    """``graph`` with its random operators numbered in order."""
    numbers = iter(range(len(graph.nodes)))
    nodes = (dataclasses.replace(node, draw=next(numbers) if _draws(node, graph) else None) for node in graph.nodes)
    return graph.replace(nodes=tuple(nodes))


def _draws(node: Node, graph: Graph) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(operator(node.op), "tags", ()):
        return False
    call = bind(node, graph.values)
    return call is None or all(call.get(name) not in (False, 0.0) for name in _SWITCHES)
