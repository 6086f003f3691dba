"""A model without its data: what programs are captured from."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from passes.capture import refuse_unsupported
from passes.capture.model_copy import copy_of, note_original
from runtime.calls.model_watch import is_light, is_plain_object


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of a model with its parameters and buffers on the meta device.

    Modules, their containers and their settings (a config) are copied, so that what a user sets on the original is
    taken up when ``ModelWatch`` says so; all else that modules hold (tables, data, locks) is shared, however large.

    Raises:
        CaptureError: for a model that cannot be planned for (the copy has no hooks on parameters to tell it by).
    """
    refuse_unsupported(model)
    copied = copy_of(model, _without_data)
    note_original(copied, model)
    settings: dict[int, Any] = {}
    for module in copied.modules():
        attributes = vars(module)
        for name, value in attributes.items():
            if is_plain_object(value) and is_light(value):
                attributes[name] = copy.deepcopy(value, settings)
    return copied


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
