"""Tensors of a parallel module whose dims change places in place (``q.t_()``), which DTensor does to its part alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from runtime.parameters.whole_tensors import GatheredView
from runtime.torch_compat.dtensors import set_content, with_sizes_of

#: Operators that move, add or drop dims in place. Without the underscore each gives a view.
TURNING = frozenset({"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"})


def turned_in_place(operator: Any, args: Any, kwargs: Any) -> Any:
    """``args[0]``, which is then the view that the operator without underscore gives.

    Raises:
        ValueError: for a parameter itself, whose shape programs rely on.
    """
    tensor: Any = args[0]
    if isinstance(tensor, nn.Parameter):
        raise ValueError(
            f"{operator.name()} would change the shape of {getattr(tensor, 'path', '')!r} of a parallel module"
        )
    name, overload = operator.name().removeprefix("aten::").partition(".")[::2]
    view = getattr(getattr(torch.ops.aten, name.removesuffix("_")), overload or "default")
    turned = view(*args, **kwargs)
    if tensor.origin is not None:
        before = tensor.origin
        tensor.origin = GatheredView(before.source, lambda whole: view(before.view(whole), *args[1:], **kwargs))
    set_content(tensor, turned)
    return with_sizes_of(operator, args, kwargs)
