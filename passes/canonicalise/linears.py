"""Matrix products of flattened tokens as ``linear`` on the tokens as they are.

``reshape(addmm(bias, reshape(x, [b*s, k]), weight), [b, s, n])`` (GPT-2's Conv1D) becomes
``linear(x, transpose(weight), bias)``, so that batch and sequence stay dims of their own.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.canonicalise.fx import aten, calls, insert, replace, shape


def unflatten_linears(module: fx.GraphModule) -> None:
    for node in calls(module.graph, aten.addmm.default, aten.mm.default):
        if node.kwargs:
            continue
        bias, left, right = node.args if node.target is aten.addmm.default else (None, *node.args)
        source = _before_flattening(left)
        if source is None or (bias is not None and shape(bias) != shape(node)[1:]):  # type: ignore[arg-type]
            continue
        lead = shape(source)[:-1]
        if all(user.target is aten.reshape.default and _splits(user, lead) for user in node.users):
            transposed = insert(node, aten.transpose.int, (right, 0, 1))
            result = insert(node, aten.linear.default, (source, transposed, bias))
            for user in list(node.users):
                if shape(user) == shape(result):
                    replace(user, result)
                else:
                    user.update_arg(0, result)


def _before_flattening(flattened: Any) -> fx.Node | None:
    """``x`` if ``flattened`` is ``reshape(x, [tokens, k])``."""
    if not isinstance(flattened, fx.Node) or flattened.target is not aten.reshape.default:
        return None
    source = flattened.args[0]
    assert isinstance(source, fx.Node)
    return source if len(shape(source)) > 2 and shape(source)[-1] == shape(flattened)[-1] else None


def _splits(user: fx.Node, lead: tuple[int, ...]) -> bool:
    return shape(user)[: len(lead)] == lead
