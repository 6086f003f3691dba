"""Losses with a sum or mean inside, as the loss of each sample and an ordinary sum or mean.

The samples then follow from the loss's own rule, and the global mean from that of ``mean``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx

from passes.canonicalise.fx import argument, aten, calls, insert, is_tensor, replace, shape
from passes.torch_compat.operators import schema

_NONE, _MEAN, _SUM = 0, 1, 2

#: Losses whose mean is that of what they give for each sample (or element).
_PLAIN_MEANS: tuple[Any, ...] = (
    aten.margin_ranking_loss.default,
    aten.hinge_embedding_loss.default,
    aten.triplet_margin_loss.default,
    aten.cosine_embedding_loss.default,
    aten.multi_margin_loss.default,
    aten.multilabel_margin_loss.default,
    aten.poisson_nll_loss.default,
)
#: The same, with a rule of their own unless their operands broadcast.
_ELEMENTWISE: tuple[Any, ...] = (
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
)


#: Losses of two tensors, element by element, with a rule of their own.
ELEMENTWISE_LOSSES: tuple[Any, ...] = (
    aten.mse_loss.default,
    aten.l1_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    *_ELEMENTWISE,
)


def separate_losses_of_rows(module: fx.GraphModule, counts: Collection[int]) -> None:
    """The same of losses of tensors that have one of some numbers of rows."""
    for node in calls(module.graph, *ELEMENTWISE_LOSSES):
        if shape(node.args[0])[:1] and shape(node.args[0])[0] in counts:  # type: ignore[arg-type]
            _separate(node)


def separate_loss_reductions(module: fx.GraphModule) -> None:
    for node in calls(module.graph, *_PLAIN_MEANS):
        _separate(node)
    for node in calls(module.graph, *_ELEMENTWISE):
        tensors = [item for item in node.args if isinstance(item, fx.Node) and is_tensor(item)]
        if any(shape(tensor) != shape(tensors[0]) for tensor in tensors):
            _separate(node)
    for node in calls(module.graph, aten.cross_entropy_loss.default):
        _of_probabilities(node)


def _separate(node: fx.Node) -> None:
    reduction = argument(node, "reduction")
    if reduction == _NONE:
        return
    names = [entry.name for entry in schema(node.target).arguments]
    args = [argument(node, name) for name in names]
    args[names.index("reduction")] = _NONE
    assert callable(node.target)
    losses = insert(node, node.target, tuple(args))
    replace(node, insert(node, aten.mean.default if reduction == _MEAN else aten.sum.default, (losses,)))


def _of_probabilities(node: fx.Node) -> None:
    """Cross-entropy with probabilities as targets: −Σ w[v] q[v] log p[v], its mean over all positions.

    With label smoothing s and V classes, q becomes (1 − s) q + s / V.
    """
    logits, target = node.args[:2]
    if not isinstance(logits, fx.Node) or not isinstance(target, fx.Node):
        return
    if not target.meta["val"].is_floating_point() or shape(target) != shape(logits):
        return
    classes = min(1, len(shape(logits)) - 1)
    smoothing, weight = argument(node, "label_smoothing"), argument(node, "weight")

    def call(operator: Any, *args: Any) -> fx.Node:
        return insert(node, operator, args)

    if smoothing:
        scaled = call(aten.mul.Tensor, target, 1.0 - smoothing)
        target = call(aten.add.Tensor, scaled, smoothing / shape(logits)[classes])
    products = call(aten.mul.Tensor, call(aten.log_softmax.int, logits, classes), target)
    if weight is not None:
        sizes = [-1 if dim == classes else 1 for dim in range(len(shape(logits)))]
        products = call(aten.mul.Tensor, products, call(aten.reshape.default, weight, sizes))
    losses = call(aten.neg.default, call(aten.sum.dim_IntList, products, [classes]))
    reduction = argument(node, "reduction")
    if reduction == _SUM or (reduction == _MEAN and not shape(losses)):
        losses = call(aten.sum.default, losses)
    elif reduction == _MEAN:
        losses = call(aten.mean.default, losses)
    replace(node, losses)
