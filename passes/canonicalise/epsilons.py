"""RMS normalization that leaves its epsilon to torch, with the number that torch takes."""

from __future__ import annotations

import torch
from torch import fx

from passes.canonicalise.fx import argument, aten, calls, retarget, value


def write_out_epsilons(module: fx.GraphModule) -> None:
    """Set ``eps=None`` to the machine epsilon of the type computed in: at least float32."""
    for node in calls(module.graph, aten.rms_norm.default):
        if argument(node, "eps") is None:
            computed = torch.promote_types(value(node.args[0]).dtype, torch.float32)  # type: ignore[arg-type]
            weight = argument(node, "weight")
            retarget(node, aten.rms_norm.default, (*node.args[:2], weight, torch.finfo(computed).eps))
