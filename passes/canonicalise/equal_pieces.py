"""The same operators on every piece of a tensor, as one call on a batch of pieces: attention image by image.

    cat([f(piece) for piece in split(x, size, d)], e)  →  f(pieces), the pieces along dim 0, which is of size 1 in each

One piece after the other asks for every sample on every rank; a batch of pieces can be divided, and is one call.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from passes.canonicalise.fx import argument, aten, calls, insert, is_random, is_tensor, replace, shape
from passes.torch_compat.operators import OpOverload

#: Operators that compute every entry of dim 0 alike from the same entry of their tensors, unless they name that dim.
_OF_ENTRIES = {
    aten.scaled_dot_product_attention.default, aten.transpose.int, aten.permute.default, aten.reshape.default,
    aten.matmul.default, aten.softmax.int, aten.to.dtype,
}  # fmt: skip


def batch_equal_pieces(module: fx.GraphModule) -> None:
    """Replace every ``cat`` of what the same operators make of all equal pieces of tensors, in their order."""
    for node in calls(module.graph, aten.cat.default):
        pieces: Any = node.args[0]
        if isinstance(pieces, (list, tuple)) and len(pieces) > 1 and _are_alike(pieces):
            replace(node, _joined(node, _Batch(node, len(pieces)).of(pieces)))


def _are_alike(pieces: Sequence[Any]) -> bool:
    """Whether the same operators of entries make all pieces of pieces in this order, one of them at least."""
    first = pieces[0]
    if not isinstance(first, fx.Node) or first.target is operator.getitem:
        return False
    return _is_batch(tuple(pieces))


def _is_batch(nodes: tuple[Any, ...]) -> bool:
    """Whether nodes are equal pieces of one tensor, or computed alike of such."""
    first = nodes[0]
    if not all(isinstance(node, fx.Node) and node.op == "call_function" for node in nodes):
        return False
    if first.target is operator.getitem:
        return _are_equal_pieces(nodes)
    if not all(_is_of_entries(node) and node.target is first.target for node in nodes):
        return False
    if len({(len(node.args), str(_numbers(node)), shape(node)) for node in nodes}) > 1:
        return False
    return all(map(_is_batch, zip(*(node.all_input_nodes for node in nodes), strict=True)))


def _numbers(node: fx.Node) -> Any:
    """The arguments of a call, with the place of each tensor among them for the tensor."""
    places = {source: place for place, source in enumerate(node.all_input_nodes)}
    return fx.map_arg((node.args, dict(sorted(node.kwargs.items()))), lambda source: f"tensor {places[source]}")  # type: ignore[arg-type,return-value]


def _are_equal_pieces(nodes: tuple[fx.Node, ...]) -> bool:
    apart: Any = nodes[0].args[0]
    if apart.target is not aten.split_with_sizes.default or len(nodes) != len(apart.meta["val"]):
        return False
    if not all(node.target is operator.getitem and node.args == (apart, i) for i, node in enumerate(nodes)):
        return False
    dim = argument(apart, "dim") % len(shape(apart.args[0]))
    return dim > 0 and shape(nodes[0])[0] == 1 and len(set(map(shape, nodes))) == 1


def _is_of_entries(node: fx.Node) -> bool:
    """Whether a call computes entries of dim 0 apart, of which there is one."""
    if not isinstance(node.target, OpOverload) or not is_tensor(node) or not node.all_input_nodes:
        return False
    if node.target not in _OF_ENTRIES and (torch.Tag.pointwise not in node.target.tags or is_random(node)):
        return False
    operands = node.all_input_nodes
    if not all(is_tensor(each) and len(shape(each)) > 1 and shape(each)[0] == 1 for each in (node, *operands)):
        return False
    match node.target:
        case aten.transpose.int:
            named = [argument(node, "dim0"), argument(node, "dim1")]
            return 0 not in [dim % len(shape(node)) for dim in named]
        case aten.permute.default:
            return bool(argument(node, "dims")[0] % len(shape(node)) == 0)
        case aten.softmax.int:
            return bool(argument(node, "dim") % len(shape(node)) > 0)
        case aten.matmul.default:
            return len(shape(operands[0])) == len(shape(operands[-1])) > 2
        case aten.scaled_dot_product_attention.default:
            return argument(node, "dropout_p") == 0 and len(shape(node)) > 3
    return node.target in _OF_ENTRIES or len({len(shape(each)) for each in operands}) == 1


class _Batch:
    """Computes pieces together, before the node that joins them."""

    def __init__(self, before: fx.Node, count: int) -> None:
        self.before, self.count = before, count
        self._batches: dict[tuple[fx.Node, ...], fx.Node] = {}

    def of(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """The batch of what ``nodes`` are, one entry of dim 0 for each."""
        key = tuple(nodes)
        if key not in self._batches:
            self._batches[key] = self._pieces(key[0]) if key[0].target is operator.getitem else self._called(key)
        return self._batches[key]

    def _pieces(self, first: fx.Node) -> fx.Node:
        apart: Any = first.args[0]
        source = apart.args[0]
        before_dim = argument(apart, "dim") % len(shape(source)) - 1
        sizes = shape(source)[1:]
        rows = [*sizes[:before_dim], self.count, shape(first)[before_dim + 1], *sizes[before_dim + 1 :]]
        split = insert(self.before, aten.reshape.default, (source, rows), like=apart)
        return _with_dim_at(self.before, split, before_dim, 0, like=apart)

    def _called(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        operands = [self.of(each) for each in zip(*(node.all_input_nodes for node in nodes), strict=True)]
        batched = dict(zip(nodes[0].all_input_nodes, operands))
        args, kwargs = fx.map_arg((nodes[0].args, nodes[0].kwargs), lambda source: batched[source])
        if nodes[0].target is aten.reshape.default:
            args = (args[0], [self.count, *shape(nodes[0])[1:]])
        return insert(self.before, nodes[0].target, tuple(args), dict(kwargs), like=nodes[0])  # type: ignore[arg-type]


def _joined(node: fx.Node, batch: fx.Node) -> fx.Node:
    """The pieces of a batch one after the other along the dim of ``node``, which joins them."""
    dim = argument(node, "dim") % len(shape(node))
    if dim == 0:
        return batch
    apart = _with_dim_at(node, batch, 0, dim - 1, like=node) if dim > 1 else batch
    return insert(node, aten.reshape.default, (apart, list(shape(node))))


def _with_dim_at(before: fx.Node, source: fx.Node, dim: int, place: int, *, like: fx.Node) -> fx.Node:
    """``source`` with one of its dims moved to another place."""
    order = [each for each in range(len(shape(source))) if each != dim]
    order.insert(place, dim)
    if order == sorted(order):
        return source
    return insert(before, aten.permute.default, (source, order), like=like)
