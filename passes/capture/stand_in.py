"""Let a model be traced without touching its weights: fake tensors stand in for parameters and buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from passes.torch_compat.symbolic_sizes import mode_with_symbols
from passes.torch_compat.tensor_fields import FakeTensorMode, without_data


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
        fake = without_data(tensor, self.mode, self.device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


def trace_device() -> torch.device:
    """Where stand-ins are: on the CPU, wherever the model is; on the GPU under its autocast, which decides dtypes."""
    if torch.cuda.is_available() and torch.is_autocast_enabled("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def autocast_dtype() -> torch.dtype | None:
    """The dtype of computation of the autocast around this call, on the device of stand-ins; None where none is on."""
    kind = trace_device().type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class OneDevice(TorchFunctionMode):
    """Puts all that a model makes or moves onto ``device``: its forward may name the GPU that it is written for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0].to(self.device)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._here(kwargs["device"])}
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], (str, int, torch.device)):
            args = (args[0], self._here(args[1]), *args[2:])
        return func(*args, **kwargs)

    def _here(self, device: Any) -> Any:
        return device if torch.device(device).type == "meta" else self.device
