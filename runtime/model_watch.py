"""Attributes of the original model that change after it was compiled: its programs were traced with the old ones.

The engine traces a copy of the model without data. A number, a string or a flag that is set on the original's modules,
or on plain objects that they hold (a config), is set on the copy too, and the next call is traced with it; other
changes are announced. The original is looked at as long as somebody else holds it.
"""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_COMPARED = (*_PLAIN, list, dict, set)
#: What every module has; modes and tensors are the parallel module's own.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

#: Module path, attribute of the module, attribute of the object that stands there ("" for the attribute itself).
Place = tuple[str, str, str]


@dataclass
class _Owner:
    """Something with attributes: a module, or a plain object that a module holds."""

    path: str
    attribute: str
    reference: weakref.ref[Any]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    size: int
    num_hooks: int


class ModelWatch:
    """Keeps ``copy`` in step with the plain attributes of ``model``.

    Attributes:
        changed: plain attributes that are other than when the model was compiled.
    """

    def __init__(self, model: nn.Module, copy: nn.Module) -> None:
        self.changed: dict[Place, Any] = {}
        self._copy = copy
        self._root = weakref.ref(model)
        self._first: dict[Place, Any] = {}
        self._announced: set[Place] = set()
        self._owners = list(_owners(model))

    @property
    def key(self) -> Hashable:
        """Equal as long as the copy's plain attributes are."""
        return tuple((place, type(value), repr(value)) for place, value in self.changed.items())

    def update(self) -> None:
        """Take up what changed on the original since the last call."""
        model = self._root()
        if model is None or not self._owners:
            return
        for owner in self._owners:
            thing = owner.reference()
            if thing is None:
                self._announce((owner.path, owner.attribute, ""), "was replaced or deleted")
                self._owners = [other for other in self._owners if other is not owner]
                continue
            attributes = thing.__dict__
            # Tuples compare what is not the same object by value.
            if len(attributes) != owner.size or tuple(map(attributes.get, owner.names)) != owner.values:
                self._take(owner, attributes)
            if not owner.attribute and _num_hooks(attributes) != owner.num_hooks:
                owner.num_hooks = _num_hooks(attributes)
                self._announce_hooks(owner.path)

    def set(self, place: Place, value: Any) -> None:
        """Set a plain attribute of the copy."""
        path, attribute, inner = place
        target: Any = self._copy.get_submodule(path)
        setattr(target if not inner else getattr(target, attribute), inner or attribute, value)
        self.changed[place] = value
        if place in self._first and _same(value, self._first[place]):
            del self.changed[place]

    def _take(self, owner: _Owner, attributes: Mapping[str, Any]) -> None:
        names = tuple(attributes) if owner.attribute else _watched(attributes)
        before = dict(zip(owner.names, owner.values))
        for name in names:
            value = attributes[name]
            place = (owner.path, owner.attribute, name) if owner.attribute else (owner.path, name, "")
            if name in before and _same(value, before[name]):
                continue
            if isinstance(value, _PLAIN):
                if name in before:
                    self._first.setdefault(place, before[name])
                self.set(place, value)
            else:
                self._announce(place, "was set")
        owner.names, owner.size = names, len(attributes)
        owner.values = tuple(_snapshot(attributes[name]) for name in names)

    def _announce_hooks(self, path: str) -> None:
        warnings.warn(
            f"hooks were registered on or removed from module {path!r} after the model was compiled: the programs "
            "do as it did then; change hooks before planner.compile",
            stacklevel=3,
        )

    def _announce(self, place: Place, what: str) -> None:
        if place in self._announced:
            return
        self._announced.add(place)
        name = ".".join(part for part in place if part)
        warnings.warn(
            f"{name!r} of the model {what} after it was compiled: the programs keep what they were traced with; if "
            "that matters, compile again",
            stacklevel=2,
        )


def _same(value: Any, before: Any) -> bool:
    return value is before or (type(value) is type(before) and isinstance(value, _COMPARED) and value == before)


def _watched(attributes: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of a module's own attributes that may be held on to."""
    return tuple(name for name, value in attributes.items() if name not in _OF_EVERY_MODULE and _is_light(value))


def _is_light(value: Any, depth: int = 0) -> bool:
    """Whether keeping ``value`` alive surely keeps no weights alive: a number, a function, a config."""
    if isinstance(value, (*_PLAIN, type, types.BuiltinFunctionType)):
        return True
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None
    if isinstance(value, (nn.Module, torch.Tensor)) or callable(value) or depth > 3:
        return False
    if isinstance(value, Mapping):
        return all(_is_light(entry, depth + 1) for entry in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_light(entry, depth + 1) for entry in value)
    return hasattr(value, "__dict__") and all(_is_light(entry, depth + 1) for entry in vars(value).values())


def _is_object(value: Any) -> bool:
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, (Mapping, list, tuple, set))


def _snapshot(value: Any) -> Any:
    """A list, dict or set as it is now; anything else itself."""
    return type(value)(value) if type(value) in (list, dict, set) else value


def _owners(model: nn.Module) -> Iterator[_Owner]:
    seen: set[int] = set()
    for path, module in model.named_modules():
        names = _watched(vars(module))
        yield _owner(path, "", module, names)
        for name in names:
            value = vars(module)[name]
            if id(value) not in seen and _is_object(value):
                seen.add(id(value))
                yield _owner(path, name, value, tuple(vars(value)))


def _owner(path: str, attribute: str, thing: Any, names: tuple[str, ...]) -> _Owner:
    values = tuple(_snapshot(vars(thing)[name]) for name in names)
    num_hooks = 0 if attribute else _num_hooks(vars(thing))
    return _Owner(path, attribute, weakref.ref(thing), names, values, len(vars(thing)), num_hooks)


def _num_hooks(attributes: Mapping[str, Any]) -> int:
    return sum(len(attributes[table]) for table in _HOOKS)
