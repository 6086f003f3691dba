"""Calls under ``torch.no_grad`` on tensors that have gradients, which ``torch.export`` would cut off for later uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from passes.ir.errors import CaptureError

#: Conversions that give back the tensor itself where there is nothing to convert.
_CONVERSIONS = frozenset(
    ("to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda", "contiguous", "positive", "real")
)


def call_without_gradients(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """The tensor itself, if gradients are off and the call gives it back; None for any other call.

    Traced, the tensor would be the call's result from here on, which has no gradient.

    Raises:
        CaptureError: for a write to a tensor that has a gradient: eager keeps the gradient of what was there before.
    """
    if torch.is_grad_enabled() or not args or not isinstance(args[0], torch.Tensor) or not args[0].requires_grad:
        return None
    tensor = args[0]
    if name in _CONVERSIONS:
        with disable_proxy_modes_tracing():
            return tensor if func(*args, **kwargs) is tensor else None
    writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or kwargs.get("out") is tensor
    if writes and not tensor.is_leaf:
        raise CaptureError(
            f"{name} writes under torch.no_grad to a tensor that has a gradient, which would be lost: write outside of "
            "torch.no_grad, or to a copy (x = x + (new - x).detach() keeps the gradient of x)"
        )
    return None
