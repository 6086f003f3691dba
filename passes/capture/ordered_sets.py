"""Sets of names are iterated in order while a model is traced: ranks, and later runs, see the same program.

Python orders a set of strings by hashes that differ from process to process. A forward that loops over one, as over the
kinds of layers of Gemma 3, would be another program on each rank.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from enum import Enum
from typing import Any

from torch import nn

#: What hashes by its letters.
_HASHED_BY_LETTERS = (str, bytes, tuple, Enum)


class AsBase(type):
    """Whose instances are all those of the builtin type that it extends."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__base__)  # type: ignore[arg-type]

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.__base__)  # type: ignore[arg-type]


class OrderedSet(set[Any], metaclass=AsBase):
    """A set that is iterated by the letters of what it holds."""

    def __iter__(self) -> Iterator[Any]:
        return _in_order(super().__iter__())

    def pop(self) -> Any:
        """The first one, which is removed."""
        for item in self:
            self.remove(item)
            return item
        return super().pop()


class OrderedFrozenSet(frozenset[Any], metaclass=AsBase):
    """The same, of one that nobody changes."""

    def __iter__(self) -> Iterator[Any]:
        return _in_order(super().__iter__())


def _in_order(items: Iterator[Any]) -> Iterator[Any]:
    held = list(items)
    return iter(sorted(held, key=repr) if all(isinstance(item, _HASHED_BY_LETTERS) for item in held) else held)


_BUILTINS = {"set": OrderedSet, "frozenset": OrderedFrozenSet}


@contextlib.contextmanager
def sets_in_order(model: nn.Module) -> Iterator[None]:
    """Inside the block ``set`` and ``frozenset`` make ordered ones, in the packages of the modules of ``model``."""
    namespaces = list(_namespaces(model))
    before = [{name: space[name] for name in _BUILTINS if name in space} for space in namespaces]
    for namespace, meant in zip(namespaces, before):
        namespace.update({name: kind for name, kind in _BUILTINS.items() if name not in meant})
    try:
        yield
    finally:
        for namespace, meant in zip(namespaces, before):
            for name in _BUILTINS.keys() - meant.keys():
                namespace.pop(name, None)


def _namespaces(model: nn.Module) -> Iterator[dict[str, Any]]:
    """The global names of all that was imported of the packages that classes of ``model`` are in, torch left out."""
    classes = {kind for module in model.modules() for kind in type(module).__mro__ if issubclass(kind, nn.Module)}
    packages = {kind.__module__.partition(".")[0] for kind in classes} - {"torch"}
    inside = tuple(f"{package}." for package in packages)
    for path, module in list(sys.modules.items()):
        is_theirs = path in packages or path.startswith(inside)
        if is_theirs and isinstance(getattr(module, "__dict__", None), dict):
            yield vars(module)
