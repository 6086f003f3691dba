"""A model without its data: what programs are captured from."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from passes.capture import refuse_unsupported


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of a model with its parameters and buffers on the meta device.

    Raises:
        CaptureError: for a model that cannot be planned for (the copy has no hooks on parameters to tell it by).
    """
    refuse_unsupported(model)
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)
