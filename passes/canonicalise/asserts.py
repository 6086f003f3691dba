"""Drop checks: shapes are static, and values are never read."""

from __future__ import annotations

from torch import fx

_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "_functional_assert_scalar",
           "sym_constrain_range", "sym_constrain_range_for_size", "_record_function_enter",
           "_record_function_enter_new", "_record_function_exit")  # fmt: skip


def drop_asserts(module: fx.GraphModule) -> None:
    for node in reversed(list(module.graph.nodes)):
        if node.op == "call_function" and not node.users:
            name = str(node.target).split(".")
            if len(name) > 1 and name[1] in _CHECKS:
                module.graph.erase_node(node)
