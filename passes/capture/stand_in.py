"""Let a model be traced without touching its weights: fake tensors stand in for parameters and buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from passes.torch_compat.module_tables import buffers_of, parameters_of
from passes.torch_compat.tensor_fields import FakeTensorMode


class StandIns:
    """Fake tensors by the tensor they stand for: one object has one stand-in, so ties stay ties."""

    def __init__(self, device: torch.device) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
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


@contextlib.contextmanager
def replaced_tensors(model: nn.Module, stand_ins: StandIns) -> Iterator[None]:
    """Parameters and buffers (and plain attributes on meta) replaced inside the block, put back after it."""
    saved: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        owners: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module))
        for tensors in owners:
            saved.extend((tensors, name, tensor) for name, tensor in tensors.items() if tensor is not None)
        saved.extend(
            (module.__dict__, name, tensor)
            for name, tensor in module.__dict__.items()
            if isinstance(tensor, torch.Tensor) and tensor.is_meta
        )
    try:
        for tensors, name, tensor in saved:
            tensors[name] = stand_ins.get(tensor)
        yield
    finally:
        for tensors, name, tensor in saved:
            tensors[name] = tensor


@contextlib.contextmanager
def mode_of(model: nn.Module, training: bool | None) -> Iterator[None]:
    """Every module in training (or evaluation) mode inside the block; None leaves them as they are."""
    flags = [(module, module.training) for module in model.modules()]
    if training is not None and training != model.training:
        model.train(training)
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
