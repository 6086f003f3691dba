"""Remove what nothing uses."""

from __future__ import annotations

from torch import fx

from passes.canonicalise.fx import writes
from passes.torch_compat.operators import OpOverload, schema


def drop_dead_code(module: fx.GraphModule) -> None:
    """Remove unused calls, except those that write to a buffer."""
    for node in reversed(list(module.graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not writes(node):
            module.graph.erase_node(node)


def drop_failed_calls(module: fx.GraphModule) -> None:
    """Remove calls that failed while the model was traced, and whose errors it caught: they have no value."""
    for node in reversed(list(module.graph.nodes)):
        has_failed = node.op == "call_function" and isinstance(node.target, OpOverload) and node.meta.get("val") is None
        if has_failed and not node.users and schema(node.target).returns:
            module.graph.erase_node(node)
