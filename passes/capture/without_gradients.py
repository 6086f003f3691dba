"""Calls under ``torch.no_grad`` on tensors that have gradients, which ``torch.export`` would cut off for later uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

#: Conversions that give back the tensor itself where there is nothing to convert.
_CONVERSIONS = frozenset(
    ("to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda", "contiguous", "positive", "real")
)


def call_without_gradients(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """The tensor itself, if gradients are off and the call gives it back; None for any other call.

    Traced, the tensor would be the call's result from here on, which has no gradient. (Writes are refused where they
    are made functional.)
    """
    if torch.is_grad_enabled() or name not in _CONVERSIONS or not args or not isinstance(args[0], torch.Tensor):
        return None
    if not args[0].requires_grad:
        return None
    with disable_proxy_modes_tracing():
        return args[0] if func(*args, **kwargs) is args[0] else None
