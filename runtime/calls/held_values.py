"""What a script holds beside weights, in a form that is equal as long as a program need not be made again.

Numbers, strings and small arrays count by what they are; tensors, modules and functions by which they are: what is
written into a tensor does not make it another one (``runtime.execution.followed_constants`` takes that up).
"""

from __future__ import annotations

import functools
import itertools
import types
from collections import deque
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

#: Entries up to which a container or object is looked at, with those of what is in it.
MAX_ENTRIES = 64
#: Elements of an array that is compared by content.
_MAX_ELEMENTS = 4096
_MAX_DEPTH = 3
_ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype))
_SEQUENCES = (list, tuple, deque)
_BY_IDENTITY = (nn.Module, types.FunctionType, type)

_numbers = itertools.count()
_of_tensors: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()
_of_things: MutableMapping[Any, int] = WeakIdKeyDictionary()


@dataclass(frozen=True)
class Held:
    """What a value is or holds.

    Attributes:
        content: numbers of tensors, modules and functions, by key what is in containers and objects.
        words: what the value is, the same in every process.
        is_fixed: whether nothing can change inside.
    """

    content: Hashable
    words: str
    is_fixed: bool


def held(value: Any, *, in_objects: bool = False, plain: bool = False) -> Held | None:
    """What ``value`` is or holds; None for what is too large, or of no interest.

    Tensors that autograd computed are left out: they are results of a call. Parameters in containers are, too.

    Args:
        in_objects: whether to look into objects with attributes.
        plain: whether containers of plain numbers and strings are of interest, too.
    """
    if type(value) in _ATOMS or isinstance(value, _BY_IDENTITY):
        return None
    if isinstance(value, torch.Tensor):
        words = f"a tensor of shape {list(value.shape)} and {value.dtype}"
        return None if value.grad_fn is not None else Held(_number(_of_tensors, value), words, is_fixed=True)
    look = _Look(in_objects)
    content = look.inside(value, _MAX_DEPTH)
    if content is None or look.num_entries > MAX_ENTRIES or not (plain or look.is_of_interest):
        return None
    return Held(content, f"a {type(value).__name__}", is_fixed=not look.changes_inside)


def held_module(module: nn.Module) -> Held:
    """Which module it is, whatever it holds."""
    return Held(_number(_of_things, module), f"a {type(module).__name__}", is_fixed=True)


def _number(table: MutableMapping[Any, int], thing: Any) -> int:
    number = table.get(thing)
    if number is None:
        number = table[thing] = next(_numbers)
    return number


class _Look:
    """A look at what one value holds.

    Attributes:
        num_entries: of all containers and objects.
        is_of_interest: whether there is more than numbers and strings.
        changes_inside: whether there is anything that can be written to.
    """

    def __init__(self, in_objects: bool) -> None:
        self._in_objects = in_objects
        self.num_entries = 0
        self.is_of_interest = self.changes_inside = False

    def inside(self, value: Any, depth: int) -> Hashable | None:
        if type(value) in _ATOMS:
            return type(value).__name__, repr(value)
        if isinstance(value, torch.Tensor):
            if isinstance(value, nn.Parameter) or value.grad_fn is not None:
                return None
            self.is_of_interest = True
            return _number(_of_tensors, value)
        if isinstance(value, _BY_IDENTITY):
            self.is_of_interest |= not isinstance(value, type)
            return _number(_of_things, value)
        if isinstance(value, (np.generic, np.ndarray)):
            self.is_of_interest = True
            self.changes_inside |= isinstance(value, np.ndarray)
            return _array(value)
        self.changes_inside |= not isinstance(value, tuple)
        if isinstance(value, (set, frozenset)):
            self.num_entries += len(value)
            return tuple(sorted(map(repr, value))) if all(type(entry) in _ATOMS for entry in value) else None
        entries = self._entries(value) if depth else None
        if entries is None:
            return None
        self.num_entries += len(entries)
        if self.num_entries > MAX_ENTRIES:
            return None
        # Tensors and modules may be keys, too, and are not compared or kept alive by this.
        return tuple((key if type(key) in _ATOMS else id(key), self.inside(entry, depth - 1)) for key, entry in entries)

    def _entries(self, value: Any) -> Sequence[tuple[Any, Any]] | None:
        if isinstance(value, functools.partial):
            return (("func", value.func), ("args", value.args), ("keywords", value.keywords))
        if isinstance(value, (Mapping, *_SEQUENCES)):
            if len(value) > MAX_ENTRIES:
                return None
            return tuple(value.items() if isinstance(value, Mapping) else enumerate(value))
        attributes = getattr(value, "__dict__", None)
        if not self._in_objects or not isinstance(attributes, dict):
            return None
        self.is_of_interest |= callable(value)
        return tuple(attributes.items())


def _array(value: np.generic | np.ndarray) -> Hashable:
    if isinstance(value, np.ndarray) and (value.dtype.hasobject or value.size > _MAX_ELEMENTS):
        return _number(_of_things, value)
    return value.dtype.str, value.shape, value.tobytes()
