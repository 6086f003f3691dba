"""Constants that are the same along a dim keep one copy of it.

Hugging Face makes its causal mask for every sample, ``[batch, 1, queries, keys]``, though all samples have the same.
A constant that is uniform along a dim is computed with size 1 there, and broadcast by its users.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from passes.canonicalise.constants import CONSTANT
from passes.canonicalise.fx import aten, calls, insert, is_tensor, shape
from passes.torch_compat.operators import OpOverload


def narrow_constants(module: fx.GraphModule) -> None:
    """Narrow every constant that something not constant uses. Constants must be marked."""
    narrower = _Narrower()
    for node in calls(module.graph):
        if not node.meta.get(CONSTANT) or not is_tensor(node):
            continue
        users = [user for user in node.users if not user.meta.get(CONSTANT)]
        narrowed = _narrow_all(narrower, node) if users else node
        if narrowed is not node:
            for user in users:
                _use(user, node, narrowed)


def _narrow_all(narrower: _Narrower, node: fx.Node) -> fx.Node:
    for dim, size in enumerate(shape(node)[:-2]):  # attention wants the last two dims of its mask whole
        if size > 1:
            node = narrower.narrow(node, dim) or node
    return node


def _use(user: fx.Node, node: fx.Node, narrowed: fx.Node) -> None:
    """Give ``narrowed`` to a user that broadcasts it, and its expansion to any other."""
    masks_attention = user.target is aten.scaled_dot_product_attention.default and node not in user.args[:3]
    if not masks_attention and not _broadcasts(user, node):
        narrowed = insert(user, aten.expand.default, (narrowed, list(shape(node))), like=node)
        narrowed.meta[CONSTANT] = True
    user.replace_input_with(node, narrowed)


def _broadcasts(user: fx.Node, node: fx.Node) -> bool:
    """Whether ``user`` works element by element and its other inputs alone have its whole shape."""
    if not is_pointwise(user):
        return False
    others = [shape(used) for used in user.all_input_nodes if used is not node]
    return bool(others) and tuple(torch.broadcast_shapes(*others)) == shape(user)


def is_pointwise(node: fx.Node) -> bool:
    """Whether a call works element by element, with broadcasting."""
    if not isinstance(node.target, OpOverload) or not is_tensor(node):
        return False
    return torch.Tag.pointwise in node.target.tags or str(node.target).split(".")[1] in _POINTWISE_UNTAGGED


#: Element by element too, though torch does not tag all their overloads so.
_POINTWISE_UNTAGGED = frozenset({"where", "masked_fill", "to", "rsub", "floor_divide", "isclose"})


class _Narrower:
    """Makes the narrow form of constants, each once."""

    def __init__(self) -> None:
        self._made: dict[tuple[fx.Node, int], fx.Node | None] = {}

    def narrow(self, node: fx.Node, dim: int) -> fx.Node | None:
        """``node`` with size 1 along ``dim``, or None if it is not known to be uniform there."""
        if shape(node)[dim] == 1:
            return node
        if (node, dim) not in self._made:
            rule = _pointwise if is_pointwise(node) else _RULES.get(node.target)
            narrowed = rule(self, node, dim) if rule is not None and node.meta.get(CONSTANT) else None
            if narrowed is not None:
                narrowed.meta[CONSTANT] = True
            self._made[node, dim] = narrowed
        return self._made[node, dim]


def _with_one(sizes: Any, dim: int) -> list[int]:
    return [1 if index == dim else size for index, size in enumerate(sizes)]


def _like(node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    assert callable(node.target)
    return insert(node, node.target, args, dict(node.kwargs))


def _pointwise(narrower: _Narrower, node: fx.Node, dim: int) -> fx.Node | None:
    narrowed: dict[fx.Node, fx.Node | None] = {}
    for used in node.all_input_nodes:
        operand_dim = dim - len(shape(node)) + len(shape(used))
        narrowed[used] = used if operand_dim < 0 else narrower.narrow(used, operand_dim)
    if None in narrowed.values():
        return None
    return _like(node, fx.map_arg(node.args, lambda used: narrowed[used]))


def _expand(narrower: _Narrower, node: fx.Node, dim: int) -> fx.Node | None:
    source: Any = node.args[0]
    source_dim = dim - len(shape(node)) + len(shape(source))
    narrowed = source if source_dim < 0 else narrower.narrow(source, source_dim)
    return None if narrowed is None else _like(node, (narrowed, _with_one(shape(node), dim)))


def _unsqueeze(narrower: _Narrower, node: fx.Node, dim: int) -> fx.Node | None:
    added: Any = node.args[1]
    source: Any = node.args[0]
    narrowed = narrower.narrow(source, dim - (dim > added))
    return None if narrowed is None else _like(node, (narrowed, added))


def _along_another(narrower: _Narrower, node: fx.Node, dim: int) -> fx.Node | None:
    """Operators that work along one dim, their second argument; ``diff`` along its third, with tensors beside."""
    position = 2 if node.target is aten.diff.default else 1
    if len(node.args) <= position or node.args[position] == dim:
        return None
    narrowed = {used: narrower.narrow(used, dim) for used in node.all_input_nodes}
    if None in narrowed.values():
        return None
    return _like(node, fx.map_arg(node.args, lambda used: narrowed[used]))


def _index(narrower: _Narrower, node: fx.Node, dim: int) -> fx.Node | None:
    """Indexing of every dim: an index that varies along ``dim`` does no harm if what it picks from is uniform."""
    source: Any = node.args[0]
    indices: Any = node.args[1]
    if len(indices) != len(shape(source)) or None in indices:
        return None
    narrowed_indices = []
    for position, index in enumerate(indices):
        index_dim = dim - len(shape(node)) + len(shape(index))
        narrowed = index if index_dim < 0 else narrower.narrow(index, index_dim)
        if narrowed is None:
            source = narrower.narrow(source, position)
            if source is None:
                return None
            first = insert(node, aten.slice.Tensor, (index, index_dim, 0, 1))
            narrowed = insert(node, aten.zeros_like.default, (first,))
            first.meta[CONSTANT] = narrowed.meta[CONSTANT] = True
        narrowed_indices.append(narrowed)
    return _like(node, (source, narrowed_indices))


def _filled(narrower: _Narrower, node: fx.Node, dim: int) -> fx.Node:
    return _like(node, (_with_one(shape(node), dim), *node.args[1:]))


def _filled_like(narrower: _Narrower, node: fx.Node, dim: int) -> fx.Node:
    return _like(node, (node.args[0], _with_one(shape(node), dim), *node.args[2:]))


_RULES: dict[Any, Callable[[_Narrower, fx.Node, int], fx.Node | None]] = {
    aten.expand.default: _expand,
    aten.unsqueeze.default: _unsqueeze,
    aten.slice.Tensor: _along_another,
    aten.cumsum.default: _along_another,
    aten.diff.default: _along_another,
    aten.index.Tensor: _index,
    aten.full.default: _filled,
    aten.zeros.default: _filled,
    aten.ones.default: _filled,
    aten.new_ones.default: _filled_like,
    aten.new_zeros.default: _filled_like,
    aten.new_full.default: _filled_like,
}
