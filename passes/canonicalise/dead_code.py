"""Remove what nothing uses."""

from __future__ import annotations

from torch import fx

from passes.canonicalise.fx import writes


def drop_dead_code(module: fx.GraphModule) -> None:
    """Remove unused calls, except those that write to a buffer."""
    for node in reversed(list(module.graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not writes(node):
            module.graph.erase_node(node)
