"""Batch normalisation in training mode, written out in ordinary operators.

The statistics of the whole batch then follow from the rules of ``mean``: where the batch is cut they are reduced over
the ranks, and a sharded model normalises exactly as one device does (as ``SyncBatchNorm``). With m the momentum and n
the number of elements of a channel,

    mean[c] = Σ x / n        var[c] = Σ (x - mean)² / n        y = (x - mean) · (var + eps)^(-1/2) · weight + bias
    running_mean ← (1 - m) running_mean + m mean        running_var ← (1 - m) running_var + m var · n / (n - 1)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from passes.canonicalise.fx import argument, aten, calls, insert, replace, shape, value

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def write_out_batch_norm(module: fx.GraphModule) -> None:
    for node in calls(module.graph, aten.batch_norm.default):
        # In evaluation mode the running statistics are plain inputs: that operator can be cut as it is.
        if argument(node, "training"):
            _write_out(node)


def _write_out(node: fx.Node) -> None:
    def call(target: Any, *args: Any) -> fx.Node:
        return insert(node, target, args)

    source = node.args[0]
    assert isinstance(source, fx.Node)
    dtype = value(source).dtype
    x = in_wide_precision(node, source)
    sizes = shape(x)
    dims = [dim for dim in range(len(sizes)) if dim != 1]
    mean = call(aten.mean.dim, x, dims, True)
    centred = call(aten.sub.Tensor, x, mean)
    var = call(aten.mean.dim, call(aten.mul.Tensor, centred, centred), dims, True)
    result = call(aten.mul.Tensor, centred, call(aten.rsqrt.default, call(aten.add.Tensor, var, argument(node, "eps"))))
    per_channel = [-1 if dim == 1 else 1 for dim in range(len(sizes))]
    for name, target in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        parameter = argument(node, name)
        if parameter is not None:
            result = call(target, result, call(aten.reshape.default, parameter, per_channel))
    count = math.prod(sizes[dim] for dim in dims)
    update_running(node, "running_mean", mean, factor=1.0)
    update_running(node, "running_var", var, factor=count / max(count - 1, 1))
    replace(node, call(aten.to.dtype, result, dtype) if dtype in _LOW_PRECISION else result)


def in_wide_precision(node: fx.Node, source: fx.Node) -> fx.Node:
    """``source`` in the dtype that its statistics are computed in, inserted before ``node``."""
    is_low = value(source).dtype in _LOW_PRECISION
    return insert(node, aten.to.dtype, (source, torch.float32)) if is_low else source


def update_running(node: fx.Node, name: str, statistic: fx.Node, *, factor: float) -> None:
    """The running statistic ``name`` moves towards that of this batch, which carries no gradient there."""
    running = argument(node, name)
    if running is None:
        return
    momentum = argument(node, "momentum")
    channels = insert(node, aten.reshape.default, (insert(node, aten.detach.default, (statistic,)), [-1]))
    decayed = insert(node, aten.mul.Tensor, (running, 1.0 - momentum))
    moved = insert(node, aten.mul.Tensor, (channels, momentum * factor))
    insert(node, aten.copy_.default, (running, insert(node, aten.add.Tensor, (decayed, moved))))
