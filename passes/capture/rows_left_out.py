"""Whether a loop calls an expert that has no rows: its parameters then have gradients of zeros, else None."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch
from torch import fx

from passes.canonicalise.fx import source_of
from passes.ir.graph import Graph
from passes.rules.expert_rules import stacked_by_loop


def without_marks(graph: Graph, paths: Collection[str]) -> Graph:
    """``graph`` in which loops whose experts compute nothing of no rows alone are marked as loops.

    Where a model calls an expert on no rows its parameters have gradients of zeros, not None.

    Args:
        paths: of the parameters that are used on no rows.
    """
    names = {state.value.name for state in graph.states if state.path in paths}
    nodes = [
        dataclasses.replace(node, args=(*node.args, 0), kwargs={})
        if stacked_by_loop(node) and names.intersection(node.inputs)
        else node
        for node in graph.nodes
    ]
    return graph.replace(nodes=tuple(nodes)) if names else graph


def placeholders_without_rows(module: fx.GraphModule) -> set[str]:
    """Names of the placeholders that a graph reads, as they are or laid out, together with tensors without entries."""
    names: set[str] = set()
    for node in module.graph.nodes:
        if node.op == "call_function" and any(_is_empty(operand) for operand in node.all_input_nodes):
            names.update(source_of(operand).name for operand in node.all_input_nodes)
    return names


def _is_empty(node: fx.Node) -> bool:
    tensor = node.meta.get("val")
    return isinstance(tensor, torch.Tensor) and 0 in tensor.shape
