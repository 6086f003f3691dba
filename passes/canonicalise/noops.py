"""Drop operators that give their input back: casts to the same dtype, aliases, contiguous, dropout that is off."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import fx

from passes.canonicalise.fx import argument, aten, calls, replace, retarget, shape, value
from passes.canonicalise.gradient_carriers import nodes_with_gradient

#: In a functional graph these give a tensor of the same values, whatever its memory.
_ALIASES = {
    aten.alias.default, aten.contiguous.default, aten.clone.default, aten.lift_fresh_copy.default,
    aten.lift_fresh.default, aten.view_as_real_copy.default, aten.resolve_neg.default,
}  # fmt: skip
_CASTS = {
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
}
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
_DROPOUTS = {
    aten.dropout.default: "train", aten.feature_dropout.default: "train", aten.alpha_dropout.default: "train",
    aten.native_dropout.default: "train", aten.rrelu.default: "training",
}  # fmt: skip


def drop_noops(module: fx.GraphModule, trainable: Collection[str]) -> None:
    """Remove what changes nothing; every cast that stays becomes ``aten.to.dtype(x, dtype)``.

    Args:
        trainable: names of placeholders that carry a gradient (a ``detach`` of anything else is no operation).
    """
    carrying = nodes_with_gradient(module.graph, trainable)
    for node in calls(module.graph):
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None:
            continue
        if node.target in _CASTS:
            _cast(node, source)
        elif node.target in _ALIASES or _same(node, source) or _detaches_nothing(node, source, carrying):
            replace(node, source)
        elif _takes_dim_away_again(node, source):
            replace(node, source.args[0])  # type: ignore[arg-type]
        elif node.target is aten.add.Tensor and isinstance(node.args[1], fx.Node):
            _begun_sum(node, source, node.args[1])


def _detaches_nothing(node: fx.Node, source: fx.Node, carrying: set[fx.Node]) -> bool:
    return node.target is aten.detach.default and source not in carrying


def _takes_dim_away_again(node: fx.Node, source: fx.Node) -> bool:
    """Whether ``node`` is ``x.unsqueeze(dim).squeeze(dim)``."""
    if node.target is not aten.squeeze.dim or source.target is not aten.unsqueeze.default:
        return False
    rank = len(shape(source))
    return bool(argument(node, "dim") % rank == argument(source, "dim") % rank)


def _begun_sum(node: fx.Node, left: fx.Node, right: fx.Node) -> None:
    """Replace ``zeros + x``, with which a sum in a loop begins, by ``x``."""
    if left.target in _ZEROS and argument(node, "alpha") == 1 and _unchanged(node, right):
        replace(node, right)
    elif right.target in _ZEROS and _unchanged(node, left):
        replace(node, left)


def _cast(node: fx.Node, source: fx.Node) -> None:
    if value(node).dtype == value(source).dtype:
        replace(node, source)
    else:
        retarget(node, aten.to.dtype, (source, value(node).dtype))


def _same(node: fx.Node, source: fx.Node) -> bool:
    check = _CHECKS.get(node.target)
    return check is not None and check(node, source)


def _same_shape(node: fx.Node, source: fx.Node) -> bool:
    return shape(node) == shape(source)


def _is_real(node: fx.Node, source: fx.Node) -> bool:
    return not value(source).dtype.is_complex


def _dropout_is_off(node: fx.Node, source: fx.Node) -> bool:
    return not argument(node, _DROPOUTS[node.target]) or argument(node, "p") == 0.0  # type: ignore[index]


def _dims_alike(node: fx.Node, source: fx.Node) -> bool:
    rank = max(len(shape(source)), 1)
    return argument(node, "dim0") % rank == argument(node, "dim1") % rank


def _in_order(node: fx.Node, source: fx.Node) -> bool:
    dims: Any = argument(node, "dims")
    return [dim % len(dims) for dim in dims] == list(range(len(dims)))


def _times_one(node: fx.Node, source: fx.Node) -> bool:
    return isinstance(node.args[1], (int, float)) and node.args[1] == 1 and _unchanged(node, source)


def _plus_zero(node: fx.Node, source: fx.Node) -> bool:
    return isinstance(node.args[1], (int, float)) and node.args[1] == 0 and _unchanged(node, source)


def _unchanged(node: fx.Node, source: fx.Node) -> bool:
    return shape(node) == shape(source) and bool(value(node).dtype == value(source).dtype)


def _pads_nothing(node: fx.Node, source: fx.Node) -> bool:
    return not any(argument(node, "pad"))


_CHECKS: dict[Any, Callable[[fx.Node, fx.Node], bool]] = {
    **dict.fromkeys(
        (aten.view.default, aten.reshape.default, aten.expand.default, aten.squeeze.dim, aten.squeeze.default,
         aten.squeeze.dims, aten.slice.Tensor, aten.repeat.default, aten.expand_as.default,
         aten.view_as.default, aten.reshape_as.default, aten.flatten.using_ints, aten._unsafe_view.default),
        _same_shape,
    ),
    **dict.fromkeys(set(_DROPOUTS) - {aten.native_dropout.default, aten.rrelu.default}, _dropout_is_off),
    aten.resolve_conj.default: _is_real,  # programs conjugate lazily, as eager does
    aten.transpose.int: _dims_alike,
    aten.permute.default: _in_order,
    aten.pad.default: _pads_nothing,
    aten.mul.Tensor: _times_one,
    aten.div.Tensor: _times_one,
    aten.add.Tensor: _plus_zero,
    aten.sub.Tensor: _plus_zero,
}  # fmt: skip
