"""Writes to a parameter in forward, as those of a model that keeps its weights within bounds (``weight.data.clamp_``).

What such a write computes of the parameter alone, element by element, is no operator of the program: every rank does it
to what it owns of the parameter before a call, once, whatever the micro-batches are. That is the same if nothing reads
the parameter before it is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from passes.canonicalise.fx import is_random, writes
from passes.ir.errors import CaptureError
from passes.torch_compat.operators import OpOverload

#: Of a placeholder: the writes to it, in order.
WRITES = "writes_before_call"

#: Operators that compute each element from that element alone, and that torch does not mark as pointwise.
_FILLING = ("aten.fill_.Scalar", "aten.zero_.default")


def note_parameter_write(node: fx.Node, parameter: fx.Node, views: Mapping[fx.Node, fx.Node]) -> None:
    """Take a write out of the graph and note it on the parameter's placeholder.

    Args:
        views: view node → the node it views, of all that were seen up to the write.

    Raises:
        CaptureError: if it is not done the same before the call.
    """
    reason = _not_alone(node) or _on_a_part(node, parameter, views) or _read_before(node, parameter, views)
    if reason is not None:
        raise CaptureError(
            f"the model writes to parameter {parameter.name[2:]!r} in its forward, {reason}: write to it between steps "
            "(under torch.no_grad(), by parallel.named_parameters()), or register it as a buffer"
        )
    parameter.meta.setdefault(WRITES, []).append((str(node.target), node.args[1:], dict(node.kwargs)))
    target = node.args[0]
    assert isinstance(target, fx.Node)
    node.replace_all_uses_with(target)
    node.graph.erase_node(node)


def _not_alone(node: fx.Node) -> str | None:
    """Why what is written depends on more than the element itself."""
    assert isinstance(node.target, OpOverload)
    arguments: tuple[Any, ...] = (*node.args[1:], *node.kwargs.values())
    is_elementwise = torch.Tag.pointwise in node.target.tags or str(node.target) in _FILLING
    if writes(node) != [0] or not is_elementwise or is_random(node):
        return f"by {node.target}, which does not write each element from that element alone"
    if not all(argument is None or isinstance(argument, (bool, int, float)) for argument in arguments):
        return f"by {node.target} with other tensors"
    return None


def _on_a_part(node: fx.Node, parameter: fx.Node, views: Mapping[fx.Node, fx.Node]) -> str | None:
    target = node.args[0]
    while target is not parameter:
        assert isinstance(target, fx.Node)
        if target.target not in _WHOLE:
            return f"through {target.target}, a part or another order of it"
        target = views[target]
    return None


#: Views that show the whole of a tensor as it lies.
_WHOLE = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _read_before(node: fx.Node, parameter: fx.Node, views: Mapping[fx.Node, fx.Node]) -> str | None:
    shown = {parameter}
    for view, source in views.items():  # in the order of the graph: a source stands before its views
        if source in shown:
            shown.add(view)
    for each in shown:
        for user in each.users:
            if user not in shown and user is not node and user < node:
                return f"after it was read by {user.target}"
    return None
