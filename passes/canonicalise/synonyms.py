"""One name for each operator that torch has several names for."""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.canonicalise.fx import aten, calls, insert, shape, value

_NAMES: dict[Any, Any] = {
    aten.__and__.Tensor: aten.bitwise_and.Tensor,
    aten.__and__.Scalar: aten.bitwise_and.Scalar,
    aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.__or__.Scalar: aten.bitwise_or.Scalar,
    aten.__xor__.Tensor: aten.bitwise_xor.Tensor,
    aten.multiply.Tensor: aten.mul.Tensor,
    aten.multiply.Scalar: aten.mul.Scalar,
    aten.subtract.Tensor: aten.sub.Tensor,
    aten.divide.Tensor: aten.div.Tensor,
    aten.true_divide.Tensor: aten.div.Tensor,
    aten.negative.default: aten.neg.default,
    aten.absolute.default: aten.abs.default,
    aten.concat.default: aten.cat.default,
    aten.concatenate.default: aten.cat.default,
    aten.greater.Tensor: aten.gt.Tensor,
    aten.greater.Scalar: aten.gt.Scalar,
    aten.less.Tensor: aten.lt.Tensor,
    aten.less.Scalar: aten.lt.Scalar,
    aten.not_equal.Tensor: aten.ne.Tensor,
    aten.not_equal.Scalar: aten.ne.Scalar,
    aten.arccos.default: aten.acos.default,
    aten.arcsin.default: aten.asin.default,
    aten.arctan.default: aten.atan.default,
    aten.arctan2.default: aten.atan2.default,
    aten.arccosh.default: aten.acosh.default,
    aten.arcsinh.default: aten.asinh.default,
    aten.arctanh.default: aten.atanh.default,
    aten.fix.default: aten.trunc.default,
    aten.ger.default: aten.outer.default,
    aten.special_digamma.default: aten.digamma.default,
    aten.special_psi.default: aten.digamma.default,
    aten.special_erf.default: aten.erf.default,
    aten.special_erfc.default: aten.erfc.default,
    aten.special_erfinv.default: aten.erfinv.default,
    aten.special_exp2.default: aten.exp2.default,
    aten.special_expm1.default: aten.expm1.default,
    aten.special_expit.default: aten.sigmoid.default,
    aten.special_gammaln.default: aten.lgamma.default,
    aten.special_gammainc.default: aten.igamma.default,
    aten.special_gammaincc.default: aten.igammac.default,
    aten.special_i0.default: aten.i0.default,
    aten.special_log1p.default: aten.log1p.default,
    aten.special_logit.default: aten.logit.default,
    aten.special_logsumexp.default: aten.logsumexp.default,
    aten.special_multigammaln.default: aten.mvlgamma.default,
    aten.special_polygamma.default: aten.polygamma.default,
    aten.special_sinc.default: aten.sinc.default,
    aten.special_softmax.default: aten.softmax.int,
    aten.special_xlogy.default: aten.xlogy.Tensor,
    aten.special_xlogy.other_scalar: aten.xlogy.Scalar_Other,
    aten.special_xlogy.self_scalar: aten.xlogy.Scalar_Self,
}

#: A tensor of given size like another is, if it has the other's size, of the other's shape: the size may then be cut.
_LIKE: dict[Any, Any] = {
    aten.new_zeros.default: aten.zeros_like.default,
    aten.new_ones.default: aten.ones_like.default,
    aten.new_full.default: aten.full_like.default,
    aten.new_empty.default: aten.empty_like.default,
}


def replace_synonyms(module: fx.GraphModule) -> None:
    for node in calls(module.graph):
        node.target = _NAMES.get(node.target, node.target)
        if node.target is aten.broadcast_tensors.default:
            _broadcast(node)
        elif node.target is aten.tile.default:
            _as_repeat(node)
        elif node.target in _LIKE:
            _as_like(node)


#: A tensor of a size of its own is none of another's, whose samples it does not mix.
_OF_SIZE: dict[Any, Any] = {
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
}


def _as_like(node: fx.Node) -> None:
    source, size, *fill = node.args
    assert isinstance(source, fx.Node)
    like = value(node)
    if tuple(size) == shape(source):  # type: ignore[arg-type]
        node.target, node.args = _LIKE[node.target], (source, *fill)
        node.kwargs = {} if like.dtype == value(source).dtype else {"dtype": like.dtype}
    elif node.target in _OF_SIZE:
        node.target, node.args = _OF_SIZE[node.target], (size, *fill)
        node.kwargs = {"dtype": like.dtype, "device": like.device}


def _as_repeat(node: fx.Node) -> None:
    """``tile`` repeats the last dims if it has fewer numbers than there are dims; ``repeat`` wants one for each."""
    source, counts = node.args
    assert isinstance(source, fx.Node)
    missing = len(shape(source)) - len(counts)  # type: ignore[arg-type]
    node.target, node.args = aten.repeat.default, (source, [*[1] * missing, *counts])  # type: ignore[misc,union-attr]


def _broadcast(node: fx.Node) -> None:
    """``broadcast_tensors`` as one ``expand`` for each tensor."""
    sources: Any = node.args[0]
    for user in list(node.users):
        if len(user.args) == 2 and isinstance(user.args[1], int):
            source = sources[user.args[1]]
            expanded = insert(user, aten.expand.default, (source, list(shape(user))))
            user.replace_all_uses_with(expanded)
            user.graph.erase_node(user)
