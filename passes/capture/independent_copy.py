"""``copy.deepcopy`` of a model that also holds results of a call."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from passes.capture.state_holders import state_holders

_Model = TypeVar("_Model", bound=nn.Module)


def independent_copy(model: _Model) -> _Model:
    """A deep copy in which tensors that autograd computed are plain data.

    torch refuses to copy those. Models hold them where ``torch.nn.utils.weight_norm`` puts the weight that it computes,
    and where forward keeps an output.

    Example:
        >>> model = torch.nn.utils.weight_norm(torch.nn.Linear(2, 2))
        >>> independent_copy(model).weight.grad_fn is None
        True
    """
    held = (value for holder in state_holders(model).values() for value in _values(holder.contents()))
    memo: dict[int, Any] = {id(value): value.detach().clone() for value in held if value.grad_fn is not None}
    return copy.deepcopy(model, memo)


def _values(contents: Any) -> Iterator[torch.Tensor]:
    for value in contents.values() if isinstance(contents, dict) else contents:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _values(value)
