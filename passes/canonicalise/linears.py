"""Matrix products of flattened tokens as ``linear`` on the tokens as they are.

``reshape(addmm(bias, reshape(x, [b*s, k]), weight), [b, s, n])`` (GPT-2's Conv1D) becomes
``linear(x, transpose(weight), bias)``, so that batch and sequence stay dims of their own. So does
``linear(reshape(x, [s*b, h*d]), weight)`` of heads [s, b, h, d] (``nn.MultiheadAttention``), whose samples could not be
cut in the middle of a dim.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from passes.canonicalise.fx import aten, calls, insert, replace, shape


def unflatten_linears(module: fx.GraphModule) -> None:
    for node in calls(module.graph, aten.addmm.default, aten.mm.default, aten.linear.default):
        if node.kwargs:
            continue
        flattened, weight, bias = _operands(node)
        lead = _lead(flattened)
        if lead is None or (bias is not None and shape(bias) != shape(node)[1:]):
            continue
        if all(user.target is aten.reshape.default and shape(user)[: len(lead)] == lead for user in node.users):
            _unflatten(node, lead, flattened, weight, bias)


def _operands(node: fx.Node) -> tuple[Any, Any, Any]:
    """Input, weight and bias (or None)."""
    if node.target is aten.addmm.default:
        bias, flattened, weight = node.args
        return flattened, weight, bias
    flattened, weight, *bias = node.args
    return flattened, weight, bias[0] if bias else None


def _lead(flattened: Any) -> tuple[int, ...] | None:
    """The two dims or more that ``flattened`` = ``reshape(x, [tokens, k])`` makes one of; None if it is no such."""
    if not isinstance(flattened, fx.Node) or flattened.target is not aten.reshape.default:
        return None
    if len(shape(flattened)) != 2:
        return None
    sizes = shape(flattened.args[0])  # type: ignore[arg-type]
    for count in range(2, len(sizes)):
        if math.prod(sizes[:count]) == shape(flattened)[0] and math.prod(sizes[count:]) == shape(flattened)[1]:
            return sizes[:count]
    return None


def _unflatten(node: fx.Node, lead: tuple[int, ...], flattened: fx.Node, weight: fx.Node, bias: fx.Node | None) -> None:
    """``linear`` on the dims ``lead`` in place of ``node``, all of whose users take them apart."""
    source: Any = flattened.args[0]
    if shape(source) != (*lead, shape(flattened)[1]):
        source = insert(node, aten.reshape.default, (source, [*lead, shape(flattened)[1]]))
    if node.target is not aten.linear.default:
        weight = insert(node, aten.transpose.int, (weight, 0, 1))
    result = insert(node, aten.linear.default, (source, weight, bias))
    for user in list(node.users):
        if shape(user) == shape(result):
            replace(user, result)
        else:
            user.update_arg(0, result)
