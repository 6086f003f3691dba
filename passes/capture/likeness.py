"""Whether two modules do the same, told from what they hold and without running them."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from passes.torch_compat.module_tables import CONTENT, buffers_of, children_of, has_hooks, parameters_of

_PLAIN = (bool, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, set, frozenset, type)


def alike(first: nn.Module, second: nn.Module, *, shift: int) -> bool:
    """Whether two modules are of the same classes all the way down, with like tensors and the same attributes.

    Args:
        shift: how far apart they stand in their list; whole-number attributes that differ by just as much (a layer's
            number) count as the same.
    """
    return first is second or (
        type(first) is type(second)
        and _same_tensors(parameters_of(first), parameters_of(second))
        and _same_tensors(buffers_of(first), buffers_of(second))
        and list(children_of(first)) == list(children_of(second))
        and not has_hooks(first)
        and not has_hooks(second)
        and _same_attributes(first, second, shift)
        and all(_alike_or_none(*pair, shift) for pair in zip(children_of(first).values(), children_of(second).values()))
    )


def moving_attributes(first: nn.Module, second: nn.Module) -> tuple[tuple[str, str], ...]:
    """(path of the module inside, attribute) of the whole numbers in which two modules that are alike differ."""
    others = dict(second.named_modules())
    return tuple(
        (path, name)
        for path, module in first.named_modules()
        for name, attribute in module.__dict__.items()
        if type(attribute) is int and attribute != others[path].__dict__[name]
    )


def _alike_or_none(first: nn.Module | None, second: nn.Module | None, shift: int) -> bool:
    return first is second if first is None or second is None else alike(first, second, shift=shift)


def _same_tensors(first: Mapping[str, torch.Tensor | None], second: Mapping[str, torch.Tensor | None]) -> bool:
    return list(first) == list(second) and all(map(_same_tensor, first.values(), second.values()))


def _same_tensor(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return type(first) is type(second) and _kind(first) == _kind(second)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.requires_grad, tensor.stride(), tensor.device


def _same_attributes(first: nn.Module, second: nn.Module, shift: int) -> bool:
    ours, theirs = first.__dict__, second.__dict__
    return ours.keys() == theirs.keys() and all(
        value is theirs[name]
        or name in CONTENT
        or (type(value) is int and type(theirs[name]) is int and theirs[name] - value == shift)
        or _same(value, theirs[name])
        for name, value in ours.items()
    )


def _same(first: Any, second: Any) -> bool:
    """Whether two attributes are surely the same; False for what cannot be told."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, (int, *_PLAIN)):
        return bool(first == second)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, Mapping):
        return list(first) == list(second) and all(_same(value, second[key]) for key, value in first.items())
    if isinstance(first, functools.partial):
        return _same((first.func, first.args, first.keywords), (second.func, second.args, second.keywords))
    if isinstance(first, types.FunctionType):
        return _same_function(first, second)
    if dataclasses.is_dataclass(first):
        return _same(vars(first), vars(second))
    return False


def _same_function(first: types.FunctionType, second: types.FunctionType) -> bool:
    """Whether two functions come from the same definition, which saw nothing else around it."""
    return (
        first.__code__ is second.__code__
        and first.__closure__ is None
        and second.__closure__ is None
        and _same(first.__defaults__, second.__defaults__)
        and _same(first.__kwdefaults__, second.__kwdefaults__)
    )
