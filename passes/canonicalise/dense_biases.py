"""Attention biases whose last dim is dense: fused kernels of a GPU take no other, and torch forms the scores instead.

A relative bias is looked up as [length, keys, heads] and turned to [heads, length, keys], and what is added to it keeps
that order in memory. What turns it is followed by ``contiguous``: one copy for the whole batch and all layers that
share the bias, where the scores would be [batch, heads, length, keys] in float32 for each of them (PyTorch's
``sdp_utils``, ``check_last_dim_stride_equals_1_dense``).
"""

from __future__ import annotations

from torch import fx

from passes.canonicalise.fx import argument, aten, calls, insert, is_tensor, shape, value


def make_biases_dense(module: fx.GraphModule) -> None:
    """Make every bias of attention that is computed dense along its last dim, where it stops being so.

    Example:
        T5's ``permute`` of [length, keys, heads] to [heads, length, keys] becomes ``permute(…).contiguous()``.
    """
    attentions = calls(module.graph, aten.scaled_dot_product_attention.default)
    biases = [bias for node in attentions if isinstance(bias := argument(node, "attn_mask"), fx.Node)]
    for turned in dict.fromkeys(node for bias in biases for node in _turned(bias)):
        copied = insert(turned.next, aten.contiguous.default, (turned,), like=turned)
        for user in [user for user in turned.users if user is not copied]:
            user.replace_input_with(turned, copied)


def _turned(bias: fx.Node) -> list[fx.Node]:
    """The calls, up to ``bias`` and itself among them, whose output is not dense although their operands are."""
    found, waiting, seen = [], [bias], set()
    while waiting:
        node = waiting.pop()
        if node in seen or node.op != "call_function" or _is_dense(node):
            continue
        seen.add(node)
        operands = [one for one in node.all_input_nodes if is_tensor(one) and len(shape(one)) > 0]
        before = [one for one in operands if not _is_dense(one) and one.op == "call_function"]
        if before:
            waiting += before
        else:
            found.append(node)
    return found


def _is_dense(node: fx.Node) -> bool:
    """Whether the last dim is dense in memory, or has a stride that is open."""
    if not is_tensor(node) or not shape(node):
        return True
    last, length = value(node).stride(-1), shape(node)[-1]
    return not isinstance(last, int) or last == 1 or (isinstance(length, int) and length == 1)
