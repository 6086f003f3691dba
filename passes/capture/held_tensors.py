"""Tensors that a model or loss function holds beside its weights: constants of a program that a script may change.

A plain attribute, an entry of a list, a global, a weight of a teacher that the loss calls. The tracer hands out what
shares their memory; found here is the tensor itself, of which a script may also replace the memory (``.data = …``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from passes.capture.state_holders import state_holders
from passes.torch_compat.module_tables import tensors_of
from passes.torch_compat.tensor_fields import FakeTensor

_lift_fresh_copy = torch.ops.aten.lift_fresh_copy.default


class HeldTensors:
    """Finds the tensor that somebody holds by one that shares its memory.

    Args:
        model: what is traced.
        others: functions that are called with it.
    """

    def __init__(self, model: nn.Module, *others: Any) -> None:
        self._model = model
        self._others = others
        self._by_memory: dict[Any, torch.Tensor] | None = None

    def of(self, constant: Any) -> Any:
        """The tensor that is held, or else ``constant``."""
        if not isinstance(constant, torch.Tensor) or not _has_memory(constant):
            return constant
        if self._by_memory is None:
            held = self._held()
            self._by_memory = {_memory(one): one for one in held if _has_memory(one)}
        return self._by_memory.get(_memory(constant), constant)

    def _held(self) -> Iterator[torch.Tensor]:
        for holder in state_holders(self._model, *self._others).values():
            contents = holder.contents()
            values = list(contents.values() if isinstance(contents, dict) else contents)
            if isinstance(holder.thing, nn.Module):
                values += tensors_of(holder.thing).values()
            yield from _tensors(values)


def is_written_out(node: fx.Node) -> bool:
    """Whether the node of a constant is a number or list in the code (``torch.tensor(8.0)``), which nobody holds."""
    return bool(node.users) and all(user.target is _lift_fresh_copy for user in node.users)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _has_memory(tensor: torch.Tensor) -> bool:
    is_real = not isinstance(tensor, FakeTensor) and not tensor.is_meta
    return is_real and tensor.layout is torch.strided and tensor.numel() > 0


def _memory(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
