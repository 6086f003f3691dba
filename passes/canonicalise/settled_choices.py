"""``where`` and ``masked_fill`` whose condition is the same constant everywhere choose nothing.

Hugging Face hides padding in a learned position bias with a mask even if there is no padding; torch itself would get
no mask then, and would not keep a copy of the bias for every sample and layer.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.canonicalise.bands import BandFinder
from passes.canonicalise.constants import CONSTANT
from passes.canonicalise.fx import aten, calls, insert, replace, shape, value

_MASKS = aten.scaled_dot_product_attention.default
#: Operator → places of what is given where the condition is true, and where it is false; the condition's own.
_CHOOSES: dict[Any, tuple[int, int, int]] = {
    aten.where.self: (1, 2, 0),
    aten.where.ScalarOther: (1, 2, 0),
    aten.where.ScalarSelf: (1, 2, 0),
    aten.masked_fill.Scalar: (2, 0, 1),
    aten.masked_fill.Tensor: (2, 0, 1),
}


def take_settled_choices(module: fx.GraphModule) -> None:
    """Put the tensor that is always chosen in the place of the choice. Constants must be marked."""
    finder = BandFinder()
    for node in calls(module.graph, *_CHOOSES):
        if node.meta.get(CONSTANT):
            continue
        chosen = _chosen(finder, node)
        if isinstance(chosen, fx.Node) and value(chosen).dtype == value(node).dtype:
            _take(node, chosen)


def _chosen(finder: BandFinder, node: fx.Node) -> Any:
    """What a choice always gives, None if it depends on the place or is not known."""
    if_true, if_false, condition = (node.args[place] for place in _CHOOSES[node.target])
    band = finder.band(condition) if isinstance(condition, fx.Node) else None
    if band is None or not band.uniform:
        return None
    return if_true if band.only else if_false


def _take(node: fx.Node, chosen: fx.Node) -> None:
    """Attention broadcasts its mask over samples and heads; anything else gets the whole shape."""
    if shape(chosen)[-2:] == shape(node)[-2:]:
        for user in list(node.users):
            if user.target is _MASKS and node not in user.args[:3]:
                user.replace_input_with(node, chosen)
    if not node.users:
        node.graph.erase_node(node)
    elif shape(chosen) == shape(node):
        replace(node, chosen)
    else:
        replace(node, insert(node, aten.expand.default, (chosen, list(shape(node)))))
