"""Serial numbers of the tensors and modules that a script holds: another one where another tensor takes its place.

What is written into a tensor does not change its number (``runtime.execution.literals`` takes that up).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

#: Entries up to which a container is looked at, with those of the containers in it.
MAX_ENTRIES = 64
_MAX_DEPTH = 3
_ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None)))

_numbers = itertools.count()
_of_tensors: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()
_of_modules: MutableMapping[nn.Module, int] = WeakIdKeyDictionary()


@dataclass(frozen=True)
class Serials:
    """The tensors, or the module, that a value is or holds: equal as long as they are the same ones.

    Attributes:
        numbers: of a tensor or module its number; of others those of entries, by key.
        words: what it is, the same in every process.
    """

    numbers: Hashable
    words: str

    @property
    def is_of_one(self) -> bool:
        return isinstance(self.numbers, int)


def serials(value: Any, *, in_objects: bool = False) -> Serials | None:
    """The serials of a tensor, or of a list, tuple or dict with tensors or modules; None for all else.

    Tensors that autograd computed are left out: they are results of a call. Parameters in containers are, too.

    Args:
        in_objects: whether to look into plain objects.
    """
    if isinstance(value, torch.Tensor):
        return None if value.grad_fn is not None else _of_tensor(value)
    if type(value) in _ATOMS:
        return None
    numbers = _Numbers(in_objects).of(value)
    return None if numbers is None else Serials(numbers, f"a {type(value).__name__} of tensors")


def serials_of(value: Any) -> Serials | None:
    """The serial of a module, whatever it holds; those of tensors."""
    if isinstance(value, nn.Module):
        return Serials(_number(_of_modules, value), f"a {type(value).__name__}")
    return serials(value)


def _of_tensor(tensor: torch.Tensor) -> Serials:
    return Serials(_number(_of_tensors, tensor), f"a tensor of shape {list(tensor.shape)} and {tensor.dtype}")


def _number(table: MutableMapping[Any, int], thing: Any) -> int:
    number = table.get(thing)
    if number is None:
        number = table[thing] = next(_numbers)
    return number


class _Numbers:
    """Numbers of the tensors in a container, beside what else it holds that is plain."""

    def __init__(self, in_objects: bool) -> None:
        self._in_objects = in_objects
        self._num_entries = 0
        self._has_tensors = False

    def of(self, value: Any) -> Hashable | None:
        """By key; None if there are no tensors, or too many entries."""
        numbers = self._inside(value, _MAX_DEPTH)
        return numbers if self._has_tensors and self._num_entries <= MAX_ENTRIES else None

    def _inside(self, value: Any, depth: int) -> Hashable | None:
        if isinstance(value, torch.Tensor):
            is_held = not isinstance(value, nn.Parameter) and value.grad_fn is None
            self._has_tensors |= is_held
            return _number(_of_tensors, value) if is_held else None
        if isinstance(value, nn.Module):
            self._has_tensors = True
            return _number(_of_modules, value)
        if type(value) in _ATOMS:
            return type(value).__name__, repr(value)
        entries = self._entries(value) if depth else None
        if entries is None:
            return None
        self._num_entries += len(entries)
        if self._num_entries > MAX_ENTRIES:
            return None
        return tuple((key, self._inside(entry, depth - 1)) for key, entry in entries)

    def _entries(self, value: Any) -> Sequence[tuple[Any, Any]] | None:
        if isinstance(value, (Mapping, list, tuple)):
            if len(value) > MAX_ENTRIES:
                return None
            return tuple(value.items() if isinstance(value, Mapping) else enumerate(value))
        if not self._in_objects or callable(value) or isinstance(value, type):
            return None
        attributes = getattr(value, "__dict__", None)
        return tuple(attributes.items()) if isinstance(attributes, dict) else None
