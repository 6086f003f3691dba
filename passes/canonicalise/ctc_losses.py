"""CTC losses as the loss of each sample, of targets in rows, and an ordinary sum or mean: samples are then independent.

Targets that a mask picks out of rows, and whose lengths are the mask's sums, are those rows with what is picked in
front. Whatever stands behind a target's length is not read.
"""

from __future__ import annotations

import torch
from torch import fx

from passes.canonicalise.fx import argument, aten, calls, insert, replace, shape
from passes.torch_compat import host_operators  # noqa: F401

_NONE, _MEAN = 0, 1
_CTC = torch.ops.meshwright.ctc_losses.default


def write_out_ctc_losses(module: fx.GraphModule) -> None:
    for node in calls(module.graph, aten.ctc_loss.Tensor):
        log_probabilities, targets, frames, lengths = node.args[:4]
        if len(shape(log_probabilities)) != 3:  # type: ignore[arg-type]
            continue
        if len(shape(targets)) == 1:  # type: ignore[arg-type]
            targets = _rows(node, targets, lengths) or targets  # type: ignore[arg-type]
        zero_infinity = argument(node, "zero_infinity")
        options = (argument(node, "blank"), zero_infinity)
        losses = insert(node, _CTC, (log_probabilities, targets, frames, lengths, *options))
        if zero_infinity:
            losses = insert(node, aten.masked_fill.Scalar, (losses, insert(node, aten.isinf.default, (losses,)), 0))
        reduction = argument(node, "reduction")
        if reduction == _MEAN:
            divisors = insert(node, aten.clamp_min.default, (lengths, 1))
            losses = insert(node, aten.mean.default, (insert(node, aten.div.Tensor, (losses, divisors)),))
        elif reduction != _NONE:
            losses = insert(node, aten.sum.default, (losses,))
        replace(node, losses)


def _rows(node: fx.Node, targets: fx.Node, lengths: fx.Node) -> fx.Node | None:
    """Targets as a row for each sample; None if they are not picked by a mask that the lengths count."""
    if targets.target is aten.masked_select.default:
        rows, mask = targets.args
    elif targets.target is aten.index.Tensor and len(targets.args[1]) == 1:  # type: ignore[arg-type]
        rows, mask = targets.args[0], targets.args[1][0]  # type: ignore[index]
    else:
        return None
    if not isinstance(rows, fx.Node) or not isinstance(mask, fx.Node) or len(shape(rows)) != 2:
        return None
    if shape(mask) != shape(rows) or str(mask.meta["val"].dtype) != "torch.bool" or not _counts(lengths, mask):
        return None
    behind = insert(node, aten.logical_not.default, (mask,))
    order = insert(node, aten.argsort.stable, (behind,), {"stable": True, "dim": 1})
    return insert(node, aten.gather.default, (rows, 1, order))


def _counts(lengths: fx.Node, mask: fx.Node) -> bool:
    """Whether ``lengths`` are how many entries of each row of ``mask`` are true."""
    if lengths.target is not aten.sum.dim_IntList or lengths.args[0] is not mask:
        return False
    dims = argument(lengths, "dim")
    return [dim % 2 for dim in dims] == [1] and not argument(lengths, "keepdim")
