"""Cross-entropy in the one form that can be sharded over the vocabulary.

``aten.cross_entropy_loss`` (and ``nll_loss`` of ``log_softmax``) of integer targets becomes

    loss[...] = meshwright.cross_entropy(logits[..., v], target[...], ignore_index, label_smoothing)

which is 0 where the target is ``ignore_index``, and ordinary sums and divisions for the reduction. Views that flatten
``[batch, sequence, v]`` to ``[batch*sequence, v]`` before the loss are undone, so that batch and sequence stay dims
of their own. Class weights multiply the loss of each token; with label smoothing s over V classes it is

    (1 − s) w[target] loss + s / V · Σ_v −w[v] log p[v]

Probabilities as targets are left as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from passes.canonicalise.fx import argument, aten, calls, insert, replace, shape, value

_NONE, _MEAN, _SUM = 0, 1, 2


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Loss of every token: ``logits`` [..., v], ``target`` [...] of integers; 0 where it is ``ignore_index``.

    ``dtype`` is that of losses and of their computation, if it is not the logits'.
    """
    losses = F.cross_entropy(
        logits.to(dtype or logits.dtype).reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        reduction="none",
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    return losses.reshape(target.shape)


def split_cross_entropy(module: fx.GraphModule) -> None:
    for node in calls(module.graph, aten.cross_entropy_loss.default):
        logits, target = node.args[:2]
        _split(node, logits, target, argument(node, "label_smoothing"))
    for node in calls(module.graph, aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default):
        scores, target = node.args[:2]
        assert isinstance(scores, fx.Node)
        classes = min(1, len(shape(scores)) - 1)
        if scores.target is aten.log_softmax.int and scores.args[1] % len(shape(scores)) == classes:  # type: ignore[operator]
            logits = scores.args[0]
            if value(scores).dtype == value(logits).dtype:  # type: ignore[arg-type]
                _split(node, logits, target, 0.0)


def _split(node: fx.Node, logits: Any, target: Any, smoothing: float) -> None:
    if value(target).is_floating_point():
        return
    ignored = argument(node, "ignore_index")
    lead = shape(target)
    logits = _unflattened(_classes_last(node, logits))
    lead_inside = shape(logits)[:-1]
    target = _reshaped(node, target, lead_inside)
    weight = argument(node, "weight")
    losses = insert(node, cross_entropy, (logits, target, ignored, smoothing if weight is None else 0.0))
    count = valid = insert(node, aten.ne.Scalar, (target, ignored))
    if weight is not None:
        count = _weights(node, weight, target, valid)
        losses = insert(node, aten.mul.Tensor, (losses, count))
        if smoothing:
            losses = _smoothed(node, losses, logits, weight, valid, smoothing)
    reduction = argument(node, "reduction")
    if reduction == _NONE:
        replace(node, _reshaped(node, losses, lead))
        return
    total = insert(node, aten.sum.default, (losses,))
    if reduction == _MEAN:
        total = insert(node, aten.div.Tensor, (total, insert(node, aten.sum.default, (count,))))
    replace(node, total)


def _classes_last(node: fx.Node, logits: fx.Node) -> fx.Node:
    """``[n, v, d1, …]`` with the classes moved to the end."""
    rank = len(shape(logits))
    if rank < 3:
        return logits
    if logits.target is aten.transpose.int and rank == 3 and set(logits.args[1:]) == {1, 2}:
        return logits.args[0]  # type: ignore[return-value]
    order = [0, *range(2, rank), 1]
    return insert(node, aten.permute.default, (logits, order))


def _unflattened(logits: fx.Node) -> fx.Node:
    """The tensor before leading dims were merged; a cast after the merge is made before it."""
    if logits.target is aten.reshape.default:
        source = logits.args[0]
        assert isinstance(source, fx.Node)
        if len(shape(source)) > 1 and shape(source)[-1] == shape(logits)[-1]:
            return _unflattened(source)
    if logits.target is aten.to.dtype:
        source = logits.args[0]
        assert isinstance(source, fx.Node)
        inner = _unflattened(source)
        if inner is not source:
            return insert(logits, aten.to.dtype, (inner, logits.args[1]))
    return logits


def _reshaped(node: fx.Node, source: fx.Node, sizes: tuple[int, ...]) -> fx.Node:
    return source if shape(source) == sizes else insert(node, aten.reshape.default, (source, list(sizes)))


def _weights(node: fx.Node, weight: fx.Node, target: fx.Node, valid: fx.Node) -> fx.Node:
    """The class weight of every token, 0 where it is ignored."""
    safe = insert(node, aten.mul.Tensor, (target, valid))
    return insert(node, aten.mul.Tensor, (insert(node, aten.index.Tensor, (weight, [safe])), valid))


def _smoothed(
    node: fx.Node, losses: fx.Node, logits: fx.Node, weight: fx.Node, valid: fx.Node, smoothing: float
) -> fx.Node:
    """Weighed losses of tokens with their share of those of all classes, which counts where a token does."""
    products = insert(node, aten.mul.Tensor, (insert(node, aten.log_softmax.int, (logits, -1)), weight))
    of_classes = insert(node, aten.mul.Tensor, (insert(node, aten.sum.dim_IntList, (products, [-1])), valid))
    share = insert(node, aten.mul.Tensor, (of_classes, smoothing / shape(logits)[-1]))
    return insert(node, aten.sub.Tensor, (insert(node, aten.mul.Tensor, (losses, 1.0 - smoothing)), share))
