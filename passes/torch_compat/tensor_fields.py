"""What torch knows of a tensor, and of the thread that works on it, without saying so in its interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunction, _functorch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "DisableTorchFunction",
    "FakeTensor",
    "FakeTensorMode",
    "gradient_hooks",
    "is_inside_transform",
    "layout_of",
    "saved_tensors_hooks_of_thread",
    "storage_id",
    "versions",
    "without_data",
]

#: Tables of hooks on a tensor → the methods that fill them.
_GRADIENT_HOOKS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}


def without_data(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    """A tensor of the same shape, strides and dtype, as an operator in ``mode`` would give it, in less time."""
    with _disable_current_modes():
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, meta, device)


def storage_id(tensor: torch.Tensor) -> int:
    """A number that tensors share if and only if they share memory, with or without data in it."""
    return tensor.untyped_storage()._cdata


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each tensor was written to; a tracer does not see the question."""
    with DisableTorchFunction():
        return [tensor._version for tensor in tensors]


def layout_of(tensor: torch.Tensor) -> torch.layout:
    """How the tensor lies in memory; a tracer does not see the question."""
    with DisableTorchFunction():
        return tensor.layout


def gradient_hooks(tensor: torch.Tensor) -> Mapping[str, Any]:
    """Hooks on a tensor's gradient, by the method that registers them; those there are."""
    return {method: hooks for table, method in _GRADIENT_HOOKS.items() if (hooks := getattr(tensor, table, None))}


def is_inside_transform() -> bool:
    """Whether this thread is in a transform of ``torch.func``."""
    return _functorch.maybe_current_level() is not None


def saved_tensors_hooks_of_thread() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """The innermost ``torch.autograd.graph.saved_tensors_hooks``: (pack, unpack); None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)
