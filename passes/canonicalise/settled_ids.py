"""Tests of ids that are within their bounds however they come out, and what is masked where they are not.

Hugging Face's experts take ids of experts on other devices: they clamp ids at the number of experts, and mask the rows
whose id is not below it. Ids that ``topk`` gives of scores of all experts are below it.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.canonicalise.bounded_ids import bound_of_ids
from passes.canonicalise.fx import argument, aten, calls, replace, shape, value

#: Operators that lay out the entries of a mask, each once or more often.
_LAID_OUT = (aten.unsqueeze.default, aten.squeeze.dim, aten.view.default, aten.reshape.default, aten.expand.default)


def drop_tests_of_bounded_ids(module: fx.GraphModule) -> None:
    """Take out clamps that change no id, and fills of rows whose ids are out of bounds, which none are."""
    for node in calls(module.graph, aten.clamp.default, aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        is_idle = _changes_no_id(node) if node.target is aten.clamp.default else _is_never_true(node.args[1])
        if is_idle and shape(source) == shape(node) and value(source).dtype == value(node).dtype:
            replace(node, source)


def _changes_no_id(node: fx.Node) -> bool:
    least, most = argument(node, "min"), argument(node, "max")
    bound = bound_of_ids(node.args[0])
    if bound is None or not all(isinstance(end, (int, type(None))) for end in (least, most)):
        return False
    return (least is None or least <= 0) and (most is None or most >= bound - 1)


def _is_never_true(mask: Any) -> bool:
    """Whether a mask is of ids that are not below a number which all are below."""
    while isinstance(mask, fx.Node) and mask.target in _LAID_OUT:
        mask = mask.args[0]
    if not isinstance(mask, fx.Node) or mask.target not in (aten.ge.Scalar, aten.gt.Scalar):
        return False
    ids, number = mask.args
    bound = bound_of_ids(ids)
    if bound is None or not isinstance(number, int):
        return False
    return number >= bound if mask.target is aten.ge.Scalar else number >= bound - 1
