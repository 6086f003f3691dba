"""Keys of arguments by content: equal for arguments that a program cannot tell apart, different for all others.

What is not a tensor is a constant of the program that is traced with it, so a call with another content needs another
program. An object counts by its class and what it holds, not by its identity: it may have changed since.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import types
from collections.abc import Hashable, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import nn

from passes.capture.nested_values import Container, Leaf, Structure
from passes.torch_compat.module_tables import tensors_of
from runtime.calls.held_values import held, held_module

#: Classes whose objects never change and are equal if their contents are.
_PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum,
          type, range, type(Ellipsis), types.BuiltinFunctionType, types.ModuleType, types.CodeType)  # fmt: skip
_SCALARS = (bool, int, float, complex, str, type(None))


def structure_key(structure: Structure, name: str) -> Hashable:
    """The key of an argument's structure: of everything in it but the tensors.

    Args:
        name: of the argument, for errors.

    Raises:
        ValueError: for an object that can neither be compared by what it holds nor is a module-level constant.
    """
    if isinstance(structure, Leaf):
        return "tensor"
    if isinstance(structure, Container):
        parts = tuple(
            structure_key(part, f"{name}.{key}" if name else str(key))
            for key, part in zip(structure.keys, structure.parts)
        )
        example = structure.example
        return (example if isinstance(example, type) else content_key(example, name)), structure.keys, parts
    return content_key(structure.value, name)


def content_key(value: Any, name: str) -> Hashable:
    """The key of a value that is not a tensor of the call.

    Raises:
        ValueError: as ``structure_key``.
    """
    return _Keys(name).of(value)


def state_key(function: Any) -> Hashable:
    """The key of what a function sees in its closure, its object or a partial: numbers, strings, tensors, modules.

    Of tensors and modules it counts which they are, not what is in them. What else is there is not looked at.
    """
    entries: list[Any] = []
    if isinstance(function, functools.partial):
        entries += [state_key(function.func), *function.args, *function.keywords.values()]
    elif isinstance(function, types.MethodType):
        entries += [state_key(function.__func__), *_attribute_values(function.__self__)]
    elif isinstance(function, types.FunctionType):
        entries += [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
        entries += function.__defaults__ or ()
    elif isinstance(function, nn.Module):
        for module in function.modules():
            entries += [*_attribute_values(module), *tensors_of(module).values()]
    elif function is not None:
        entries += _attribute_values(function)
    plain = tuple((type(entry), repr(entry)) for entry in entries if _is_plain(entry))
    others = (held_module(entry) if isinstance(entry, nn.Module) else held(entry) for entry in entries)
    return plain, tuple(other for other in others if other is not None)


def _attribute_values(value: Any) -> list[Any]:
    return list(getattr(value, "__dict__", {}).values())


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*_SCALARS, type)) or (isinstance(value, tuple) and all(map(_is_plain, value)))


class _Keys:
    """Makes the key of one argument; objects that hold each other are numbered as they are met."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._numbers: dict[int, int] = {}
        self._visited: list[Any] = []

    def of(self, value: Any) -> Hashable:
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, (float, complex)):  # nan is equal to itself here, and 0.0 is not -0.0
            return type(value), repr(value)
        if isinstance(value, np.generic):
            return type(value), value.tobytes()
        if id(value) in self._numbers:
            return "again", self._numbers[id(value)]
        self._numbers[id(value)] = len(self._numbers)
        self._visited.append(value)
        return type(value), self._inside(value)

    def _inside(self, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            return _tensor_key(value)
        if isinstance(value, np.ndarray):
            return self._array_key(value)
        if isinstance(value, nn.Module):
            raise self._refusal("its weights would become constants: make it a submodule of the model")
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            return value.__code__, self.of([value.__defaults__, value.__kwdefaults__, cells])
        if isinstance(value, types.MethodType):
            return self.of(value.__func__), self.of(value.__self__)
        if isinstance(value, functools.partial):
            return tuple(map(self.of, (value.func, value.args, value.keywords)))
        if isinstance(value, Mapping):
            return tuple((self.of(key), self.of(entry)) for key, entry in value.items()), self._attributes(value)
        if isinstance(value, Set):
            return frozenset(map(self.of, value))
        if isinstance(value, (list, tuple)):
            return tuple(map(self.of, value)), self._attributes(value)
        return self._object_key(value)

    def _array_key(self, array: np.ndarray) -> Hashable:
        if array.dtype.hasobject:
            return array.shape, tuple(map(self.of, array.flat))
        return array.dtype.str, array.shape, _digest(np.ascontiguousarray(array))

    def _object_key(self, value: Any) -> Hashable:
        attributes = self._attributes(value)
        if attributes is not None:
            return attributes
        try:
            reduced = value.__reduce_ex__(2)
        except TypeError:
            raise self._refusal("what it holds cannot be compared from call to call: pass tensors, numbers or plain "
                                "objects") from None  # fmt: skip
        return tuple(map(self.of, reduced)) if isinstance(reduced, tuple) else reduced

    def _attributes(self, value: Any) -> Hashable:
        """Attributes by name; None if objects of the class have none."""
        slots = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
        entries = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        entries |= getattr(value, "__dict__", {})
        if not slots and not hasattr(value, "__dict__"):
            return None
        return tuple((name, self.of(entry)) for name, entry in entries.items())

    def _refusal(self, reason: str) -> ValueError:
        kind = type(self._visited[-1]).__name__
        return ValueError(f"argument {self.name!r} holds a {kind}, which becomes part of the program, but {reason}")


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def content_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype, bytes]:
    """Shape, dtype and a digest of the values of a tensor with data."""
    whole = tensor.detach().cpu().contiguous().flatten()
    digest = _digest(whole.view(torch.uint8).numpy() if whole.numel() else np.empty(0))
    return tuple(tensor.shape), tensor.dtype, digest


def _tensor_key(tensor: torch.Tensor) -> Hashable:
    where = (tensor.device, tensor.requires_grad)
    return (tuple(tensor.shape), tensor.dtype, *where) if tensor.is_meta else (*content_of(tensor), *where)


def _digest(array: np.ndarray) -> bytes:
    return hashlib.blake2b(array.tobytes(), digest_size=16).digest()
