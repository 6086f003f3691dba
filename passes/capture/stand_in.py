"""Let a model be traced without touching its weights: fake tensors stand in for parameters and buffers."""

from __future__ import annotations

import torch
from torch import nn

from passes.torch_compat.symbolic_sizes import mode_with_symbols
from passes.torch_compat.tensor_fields import FakeTensorMode


class StandIns:
    """Fake tensors by the tensor they stand for: one object has one stand-in, so ties stay ties.

    ``with_symbols``: sizes of inputs may be left open.
    """

    def __init__(self, device: torch.device, *, with_symbols: bool = False) -> None:
        self.mode = mode_with_symbols() if with_symbols else FakeTensorMode(allow_non_fake_inputs=True)
        self.device = device
        self._made: dict[int, torch.Tensor] = {}

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of a parameter or buffer: same shape, strides, dtype and ``requires_grad``."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = self.fresh(tensor)
        return self._made[id(tensor)]

    def fresh(self, tensor: torch.Tensor) -> torch.Tensor:
        """A stand-in of its own, also if the same tensor came before (two inputs must not be one)."""
        with self.mode, torch.device(self.device):
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's tensors are; CPU for a model on the meta device or without tensors."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")
