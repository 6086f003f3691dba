"""A filled tensor of one element is a constant, whatever it takes its shape from.

``torch.autograd.grad`` inside of a model starts from ``ones_like(loss)``: without this the loss's sum over all samples
would be needed for a number that does not depend on it.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.canonicalise.fx import aten, calls, insert, replace, shape, value

_FILLED_WITH: dict[Any, int] = {aten.ones_like.default: 1, aten.zeros_like.default: 0}


def fill_scalars(module: fx.GraphModule) -> None:
    """Replace ``ones_like``, ``zeros_like`` and ``full_like`` of one element by ``full``."""
    for node in calls(module.graph, *_FILLED_WITH, aten.full_like.default):
        like = value(node)
        if like.numel() != 1:
            continue
        number = _FILLED_WITH.get(node.target, node.args[1] if len(node.args) > 1 else None)
        if isinstance(number, (bool, int, float)):
            placed = {"dtype": like.dtype, "device": like.device}
            replace(node, insert(node, aten.full.default, (list(shape(node)), number), placed))
