"""Rows of experts with the dims that they were flattened from: batch, sequence, choices.

Models flatten tokens before they route them. On ``[tokens, hidden]`` only the outermost of the flattened dims can be
cut. Operators that treat rows alike are moved in front of the reshape that merges the dims, one after the other, until
another reshape takes the dims apart again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx

from passes.canonicalise.expert_rows import expert_linear
from passes.canonicalise.fx import aten, calls, insert, replace, shape
from passes.canonicalise.row_operators import rebuild


def unmerge_token_dims(module: fx.GraphModule) -> None:
    """Compute on unmerged rows what is computed on merged ones: in graphs without experts only on rows that are merged
    sequence first, whose samples could not be cut in the middle of a dim."""
    has_experts = any(True for _ in calls(module.graph, expert_linear))
    unmerged: set[fx.Node] = set()

    def is_followed(base: fx.Node) -> bool:
        return has_experts or base in unmerged or (base.target is aten.transpose.int and set(base.args[1:]) == {0, 1})

    for node in calls(module.graph):
        if node.target is aten.reshape.default:
            base = _base(node)
            if shape(base) == shape(node) and is_followed(base):
                replace(node, base)
        else:
            unmerged.update(_before_merging(node, is_followed))
    for node in calls(module.graph, expert_linear):
        _broadcast(node)


def _before_merging(node: fx.Node, is_followed: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Move ``node`` in front of the reshapes that merge the rows of its operands; the results there."""
    sources = {operand: _unmerged(operand) for operand in node.all_input_nodes}
    sources = {operand: source for operand, source in sources.items() if source and is_followed(source[0])}
    leads = {shape(base)[:count] for base, count in filter(None, sources.values())}
    if len(leads) != 1:
        return []
    (lead,) = leads
    rows = {operand: _apart(operand, source[0], lead) for operand, source in sources.items() if source is not None}
    result = rebuild(node, rows, len(lead))
    if result is None:
        return []
    if hasattr(node.meta["val"], "shape"):
        replace(node, insert(node, aten.reshape.default, (result, list(shape(node)))))
        return [result]
    parts = []
    for user in list(node.users):  # of a call with several results
        parts.append(insert(user, user.target, (result, user.args[1])))  # type: ignore[arg-type]
        replace(user, insert(user, aten.reshape.default, (parts[-1], list(shape(user)))))
    node.graph.erase_node(node)
    return parts


def _base(node: fx.Node) -> fx.Node:
    """What a row of reshapes starts from."""
    while node.target is aten.reshape.default:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _unmerged(node: fx.Node) -> tuple[fx.Node, int] | None:
    """(source, number of dims) if ``node`` merges the first dims of ``source`` to one; the rest may change, too."""
    if node.target is not aten.reshape.default or not shape(node):
        return None
    base = _base(node)
    rows, rest = shape(node)[0], shape(node)[1:]
    same_rest = len(shape(base)) - len(rest)
    for count in (same_rest, *range(2, len(shape(base)) + 1)):
        if count > 1 and math.prod(shape(base)[:count]) == rows:
            return base, count
    return None


def _apart(node: fx.Node, base: fx.Node, lead: tuple[int, ...]) -> fx.Node:
    """The rows of ``node`` laid out by ``lead``: ``base``, or what takes apart its other dims as ``node`` does."""
    apart = (*lead, *shape(node)[1:])
    return base if shape(base) == apart else insert(node, aten.reshape.default, (base, list(apart)))


def _broadcast(node: fx.Node) -> None:
    """Experts read the rows of a token once: what is expanded for its choices need not be."""
    source: Any = node.args[0]
    if source.target is aten.expand.default:
        narrow = shape(source.args[0])
        if len(narrow) == len(shape(source)) and narrow[-1] == shape(source)[-1]:
            node.update_arg(0, source.args[0])
