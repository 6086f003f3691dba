"""Cross-entropy of logits that are widened for it reads the narrow ones.

Models cast their logits to float32 before the loss: a copy of [tokens, vocabulary], and a gradient of that size, of
numbers that have 16 bits. The loss computes in float32 whatever it reads, and rounds the gradient to the logits' dtype
as the cast's backward does:

    cross_entropy(to(logits, float32), …)  →  cross_entropy(logits, …, dtype=float32)
"""

from __future__ import annotations

import torch
from torch import fx

from passes.canonicalise.cross_entropy_form import cross_entropy
from passes.canonicalise.fx import aten, calls, evaluate, value

_NARROW = (torch.bfloat16, torch.float16)
#: What may lie between the cast and the loss.
_VIEWS = frozenset({
    aten.reshape.default, aten.slice.Tensor, aten.select.int, aten.permute.default, aten.transpose.int,
    aten.squeeze.dim, aten.unsqueeze.default,
})  # fmt: skip


def read_narrow_logits(module: fx.GraphModule) -> None:
    """Drop the casts in front of losses, in place."""
    for loss in calls(module.graph, cross_entropy):
        views: list[fx.Node] = []
        node = loss.args[0]
        while isinstance(node, fx.Node) and node.target in _VIEWS and len(node.users) == 1:
            views.append(node)
            node = node.args[0]
        if not isinstance(node, fx.Node) or not _widens(node):
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        (views[-1] if views else loss).replace_input_with(node, source)
        module.graph.erase_node(node)
        for view in reversed(views):
            assert callable(view.target)
            view.meta["val"] = evaluate(view.target, view.args, dict(view.kwargs), like=view)
        loss.kwargs = {**loss.kwargs, "dtype": torch.float32}


def _widens(node: fx.Node) -> bool:
    """Whether a call does no more than cast to float32, for the loss alone."""
    if node.target is not aten.to.dtype or len(node.users) != 1:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and value(source).dtype in _NARROW and value(node).dtype == torch.float32
