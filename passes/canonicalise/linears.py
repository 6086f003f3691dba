"""Matrix products of flattened tokens as ``linear`` on the tokens as they are.

``reshape(addmm(bias, reshape(x, [b*s, k]), weight), [b, s, n])`` (GPT-2's Conv1D) becomes
``linear(x, transpose(weight), bias)``, so that batch and sequence stay dims of their own. So does
``reshape(linear(reshape(x, [s*b, h*d]), weight), [s, b, n])`` of heads [s, b, h, d] or [s, b*h, d]
(``nn.MultiheadAttention``), whose samples could not be cut in the middle of a dim.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

from torch import fx

from passes.canonicalise.fx import aten, calls, insert, replace, shape


def unflatten_linears(module: fx.GraphModule) -> None:
    for node in calls(module.graph, aten.addmm.default, aten.mm.default, aten.linear.default):
        if node.kwargs:
            continue
        flattened, weight, bias = _operands(node)
        lead = _lead(node)
        is_flattened = isinstance(flattened, fx.Node) and flattened.target is aten.reshape.default
        if lead is not None and is_flattened and (bias is None or shape(bias) == shape(node)[1:]):
            _unflatten(node, lead, flattened, weight, bias)


def _operands(node: fx.Node) -> tuple[Any, Any, Any]:
    """Input, weight and bias (or None)."""
    if node.target is aten.addmm.default:
        bias, flattened, weight = node.args
        return flattened, weight, bias
    flattened, weight, *bias = node.args
    return flattened, weight, bias[0] if bias else None


def _lead(node: fx.Node) -> tuple[int, ...] | None:
    """The dims, two or more, into which all users of a product [tokens, n] take its tokens apart; None for others."""
    if len(shape(node)) != 2 or not all(user.target is aten.reshape.default for user in node.users):
        return None
    leads = {_dims_of(shape(node)[0], shape(user)) for user in node.users}
    lead = leads.pop() if len(leads) == 1 else ()
    return lead if len(lead) > 1 else None


def _dims_of(tokens: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The first dims that are ``tokens`` together; none if no number of them is."""
    counts = list(itertools.accumulate(sizes, operator.mul))
    return sizes[: counts.index(tokens) + 1] if tokens in counts else ()


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
