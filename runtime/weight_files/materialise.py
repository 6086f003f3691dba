"""Allocates memory for tensors that are still on meta."""

from __future__ import annotations

import torch
from torch import nn

from runtime.state.exchange import exchange
from runtime.state.owned import Owned


def materialise(owned: Owned, device: torch.device | str) -> torch.Tensor:
    """The tensor to write a rank's piece into: without history, and on ``device`` with memory if it was on meta.

    The object stays the same, for optimizers and modules that refer to it.
    """
    tensor = owned.tensor
    if tensor.is_meta:
        new: torch.Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        exchange(tensor, new)
    return tensor.detach()
