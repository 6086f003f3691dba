"""Operators whose tensors must have one dtype: torch checks that when they run, not when they are traced."""

from __future__ import annotations

import torch
from torch import fx

from passes.ir.errors import CaptureError

_aten = torch.ops.aten

#: Operator → positions of the tensors that must have one dtype.
_ALIKE = {
    _aten.linear.default: (0, 1, 2),
    _aten.mm.default: (0, 1),
    _aten.mv.default: (0, 1),
    _aten.addmm.default: (0, 1, 2),
    _aten.matmul.default: (0, 1),
    _aten.conv1d.default: (0, 1, 2),
    _aten.conv2d.default: (0, 1, 2),
    _aten.conv3d.default: (0, 1, 2),
    _aten.conv_transpose1d.default: (0, 1, 2),
    _aten.conv_transpose2d.input: (0, 1, 2),
    _aten.conv_transpose3d.input: (0, 1, 2),
    _aten.convolution.default: (0, 1, 2),
    _aten.index_add.default: (0, 3),
    _aten.cdist.default: (0, 1),
}


def refuse_unlike_dtypes(node: fx.Node, where: str) -> None:
    """Raise CaptureError if ``node``, in the module that ``where`` names, gets dtypes that it cannot compute with."""
    tensors = [node.args[place] for place in _ALIKE.get(node.target, ()) if place < len(node.args)]  # type: ignore[call-overload]
    dtypes = [tensor.meta["val"].dtype for tensor in tensors if isinstance(tensor, fx.Node)]
    if len(set(dtypes)) > 1:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CaptureError(
            f"{where}: {node.target} gets tensors of {names}, which must have one dtype: convert inputs to that of the "
            "weights (x.to(weight.dtype)), or the model to theirs"
        )
