"""Errors that a model raises for some elements of a tensor are checked where that tensor is made.

``if (variance < 0).any(): raise`` is captured as a check of one flag, on the way of the loss. That flag needs all
samples, so that no micro-batch could be run. Checked element by element, each rank and micro-batch sees to its own::

    loss = checked(loss, any(variance < 0), False)      variance = checked_each(variance, variance < 0, False)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes.canonicalise.fx import aten, calls, insert, replace, shape, value

_CHECKED = torch.ops.meshwright.checked.default
_CHECKED_EACH = torch.ops.meshwright.checked_each.default
#: Reduction of flags → what it has to give so that every flag has to be the same.
_REDUCTIONS: dict[Any, bool] = {aten.any.default: False, aten.all.default: True}
_NEGATIONS = (aten.logical_not.default, aten.bitwise_not.default)
#: What Python's ``bool`` makes of a flag, and copies.
_SAME = (aten.ne.Scalar, aten.clone.default, aten.alias.default, aten.detach.default)


def check_each_element(module: fx.GraphModule) -> None:
    """Replace checks of all elements by checks of each, where what is tested goes on to the outputs."""
    for check in list(calls(module.graph, _CHECKED)):
        flags, expected = _flags(check)
        if flags is None:
            continue
        order = {node: place for place, node in enumerate(module.graph.nodes)}
        tested, chain = _tested(flags)
        behind = [user for user in tested.users if user not in chain and order[user] > order[flags]] if tested else []
        if tested is None or not any(_leads_to(user, check) for user in behind):
            continue
        same = insert(behind[0] if len(behind) == 1 else min(behind, key=order.__getitem__), _CHECKED_EACH,
                      (tested, flags, expected, check.args[3]), like=check)  # fmt: skip
        for user in behind:
            user.replace_input_with(tested, same)
        replace(check, check.args[0])  # type: ignore[arg-type]


def _flags(check: fx.Node) -> tuple[fx.Node | None, bool]:
    """The flags that a check demands to be alike, and what each has to be; None if it demands something else."""
    flag, expected = check.args[1], bool(check.args[2])
    while isinstance(flag, fx.Node) and flag.target in (*_NEGATIONS, *_SAME):
        if flag.target is aten.ne.Scalar and flag.args[1] != 0:
            return None, expected
        expected ^= flag.target in _NEGATIONS
        flag = flag.args[0]
    if not isinstance(flag, fx.Node) or _REDUCTIONS.get(flag.target) is not expected:
        return None, expected
    flags = flag.args[0]
    return (flags, expected) if isinstance(flags, fx.Node) and shape(flags) else (None, expected)


def _tested(flags: fx.Node) -> tuple[fx.Node | None, set[fx.Node]]:
    """The nearest floating point tensor of that shape that ``flags`` are computed from, and the nodes between."""
    chain: set[fx.Node] = {flags}
    waiting = list(flags.all_input_nodes)
    while waiting:
        node = waiting.pop(0)
        if shape(node) != shape(flags):
            continue
        if value(node).is_floating_point() and any(_is_elsewhere(user, chain) for user in node.users):
            return node, chain
        chain.add(node)
        waiting += node.all_input_nodes
    return None, chain


def _is_elsewhere(user: fx.Node, chain: set[fx.Node]) -> bool:
    """Whether a use of a tensor is none of those that lead to flags alone."""
    return user not in chain and not (user.users and all(behind in chain for behind in user.users))


def _leads_to(node: fx.Node, end: fx.Node) -> bool:
    seen: set[fx.Node] = set()
    waiting: list[Any] = [node]
    while waiting:
        current = waiting.pop()
        if current is end:
            return True
        if current not in seen:
            seen.add(current)
            waiting += current.users
    return False
