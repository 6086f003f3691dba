"""Running statistics of instance normalisation, written beside it: the average over the batch of what each sample has.

What is normalised by statistics of its own depends on no other sample; the running statistics do, by an ordinary mean.
With m the momentum and n the number of positions of a channel,

    running_mean ← (1 - m) running_mean + m mean over samples of Σ x / n
    running_var ← (1 - m) running_var + m mean over samples of Σ (x - mean)² / (n - 1)
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from passes.canonicalise.batch_norm import in_wide_precision, update_running
from passes.canonicalise.fx import argument, aten, calls, insert, replace, shape
from passes.torch_compat.operators import schema


def write_out_running_statistics(module: fx.GraphModule) -> None:
    for node in calls(module.graph, aten.instance_norm.default):
        running = [argument(node, name) for name in ("running_mean", "running_var")]
        if argument(node, "use_input_stats") and any(buffer is not None for buffer in running):
            _write_out(node)


def _write_out(node: fx.Node) -> None:
    def call(target: Any, *args: Any) -> fx.Node:
        return insert(node, target, args)

    source: Any = argument(node, "input")
    x = in_wide_precision(node, call(aten.detach.default, source))
    positions = list(range(2, len(shape(source))))
    mean = call(aten.mean.dim, x, positions, True)
    centred = call(aten.sub.Tensor, x, mean)
    var = call(aten.mean.dim, call(aten.mul.Tensor, centred, centred), positions, True)
    count = math.prod(shape(source)[2:])
    update_running(node, "running_mean", call(aten.mean.dim, mean, [0]), factor=1.0)
    update_running(node, "running_var", call(aten.mean.dim, var, [0]), factor=count / max(count - 1, 1))
    names = [entry.name for entry in schema(node.target).arguments]
    args = [None if name.startswith("running") else argument(node, name) for name in names]
    replace(node, call(node.target, *args))
