"""Mark the nodes that depend on shapes and literals alone, and make those that are alike one.

They (attention masks, position ids) are computed once per shape, outside the step. They are marked, not computed:
a mask may be larger than the model.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx

from passes.canonicalise.fx import is_random, writes

CONSTANT = "meshwright_constant"


def mark_constants(module: fx.GraphModule, literals: Collection[str]) -> None:
    """Set ``node.meta[CONSTANT]`` on nodes whose inputs are all constant, and merge equal ones.

    Args:
        literals: names of the placeholders that are literal tensors of the code.
    """
    seen: dict[Any, fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.op == "placeholder":
            constant = node.name in literals
        else:
            constant = node.op == "call_function" and not is_random(node) and not writes(node)
            constant = constant and all(used.meta.get(CONSTANT) for used in node.all_input_nodes)
        if not constant:
            continue
        node.meta[CONSTANT] = True
        if node.op == "call_function":
            first = seen.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                module.graph.erase_node(node)
