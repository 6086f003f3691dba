"""Gated experts whose two first layers are modules of their own: one layer of both, whose halves are taken apart.

``silu(expert_linear(x, ids, stack(w1))) * expert_linear(x, ids, stack(w3))`` is what experts with one weight of both
compute. The weights are parameters of their own, and copied once either way.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from passes.canonicalise.expert_rows import expert_linear
from passes.canonicalise.fx import aten, calls, insert, shape
from passes.rules.expert_rules import STACKED_BY_LOOP

_ACTIVATIONS = (aten.silu.default, aten.gelu.default)


def join_expert_gates(module: fx.GraphModule) -> None:
    """Join the first layers of gated experts where both stack the weights of every expert."""
    for node in calls(module.graph, aten.mul.Tensor):
        for activated, up in (node.args, node.args[::-1]):
            if not isinstance(activated, fx.Node) or activated.target not in _ACTIVATIONS or len(activated.users) != 1:
                continue
            gate: Any = activated.args[0]
            if _stacks_weights(gate) and _stacks_weights(up) and gate.args[:2] == up.args[:2]:  # type: ignore[union-attr]
                _join(node, activated, up)  # type: ignore[arg-type]
                break


def _stacks_weights(node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.target is not expert_linear or len(node.users) != 1:
        return False
    weight: Any = node.args[2]
    return weight.target is aten.stack.default and len(weight.args) == 1 and len(weight.users) == 1


def _stacked(node: Any) -> list[fx.Node]:
    return list(node.args[2].args[0])


def _join(product: fx.Node, activated: fx.Node, up: fx.Node) -> None:
    gate: Any = activated.args[0]
    gates, ups = (_stacked(node) for node in (gate, up))
    if {shape(each) for each in gates} != {shape(each) for each in ups}:
        return
    inner, size = shape(gates[0])
    pairs = [weight for pair in zip(gates, ups) for weight in pair]
    stacks: list[Any] = [gate.args[2], up.args[2]]
    if all(stack.kwargs == STACKED_BY_LOOP for stack in stacks):
        beside = insert(product, aten.cat.default, (pairs,), dict(STACKED_BY_LOOP))
    else:
        beside = insert(product, aten.cat.default, (pairs, 0))
    weight = insert(product, aten.reshape.default, (beside, [len(gates), 2 * inner, size]))
    both = insert(product, expert_linear, (*gate.args[:2], weight))
    halves = insert(product, aten.split_with_sizes.default, (both, [inner, inner], -1))
    first, second = (insert(product, operator.getitem, (halves, place)) for place in (0, 1))
    again = insert(product, activated.target, (first,), dict(activated.kwargs))  # type: ignore[arg-type]
    product.args = (again, second)
