"""Remove what nothing uses."""

from __future__ import annotations

from torch import fx

from passes.canonicalise.fx import writes


def drop_dead_code(module: fx.GraphModule) -> None:
    """Remove unused calls, except those that write to a buffer."""
    for node in reversed(list(module.graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not _has_effect(node):
            module.graph.erase_node(node)


def _has_effect(node: fx.Node) -> bool:
    if writes(node):
        return True
    # batch_norm updates its running statistics; its schema does not say so.
    return "batch_norm" in str(node.target) and any(used.name.startswith("b_") for used in node.all_input_nodes)
