"""A copy of a model to be traced, so that tracing touches nothing that a user holds.

Modules, the containers that they hold, and whatever leads to a module or a replaced tensor (bound methods, partials,
closures, names of a script, plain objects) are copied; everything else is shared. What cannot be followed (slots,
objects of C, what libraries keep to themselves) still leads to the model itself: ``WatchedForward`` refuses its use.
No code of the objects runs, neither when they are copied nor when a copy is freed: the copy of what has ``__del__``
(a connection that it closes) has none.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from passes.capture.ordered_sets import OrderedSet
from passes.torch_compat.module_tables import tensors_of

_Model = TypeVar("_Model", bound=nn.Module)
_Thing = TypeVar("_Thing")
_ORIGINAL = "_original_of_copy"
_CONTAINERS = (dict, list, set, deque)
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, torch.dtype, torch.device,
          torch.jit.ScriptModule)  # fmt: skip
#: Most of what a model holds, told at once by its exact type.
_COMMON_ATOMS = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))
_COMMON_TABLES = frozenset((dict, OrderedDict))
#: Most containers → what makes an empty one.
_EMPTY: dict[type, Callable[[], Any]] = {dict: dict, OrderedDict: OrderedDict, list: list, set: OrderedSet}
#: Packages whose functions know no model of a user by a global name, and whose objects are never copied. Ours are those
#: that a plan, a graph and a program are made of.
_LIBRARIES = ("torch.", "transformers.", "passes.", "cost_models.")


def copy_of(
    model: _Model, stand_in: Callable[[torch.Tensor], torch.Tensor], others: Iterable[torch.Tensor] = ()
) -> _Model:
    """``model`` with ``stand_in(tensor)`` for its parameters and buffers, plain attributes on meta, and ``others``."""
    tensors = {id(tensor): stand_in(tensor) for module in model.modules() for tensor in _tensors(module)}
    tensors.update({id(tensor): stand_in(tensor) for tensor in others})
    return _Copies(model, tensors).of(model)


def note_original(copied: nn.Module, model: nn.Module) -> None:
    """Remember, while it lives, what ``copied`` is a copy of: a loss function of a script leads to that."""
    vars(copied)[_ORIGINAL] = vars(model).get(_ORIGINAL) or weakref.ref(model)


def original_of(model: nn.Module) -> nn.Module | None:
    """What ``model`` was noted to be a copy of, if that lives still."""
    reference = vars(model).get(_ORIGINAL)
    original: nn.Module | None = None if reference is None else reference()
    return original


def leading_to_copy(thing: _Thing, copied: nn.Module) -> _Thing:
    """``thing``; a copy of it that leads to ``copied`` where it leads to the model which that is a copy of."""
    original = original_of(copied)
    if original is None:
        return thing
    modules = dict(copied.named_modules(remove_duplicate=False))
    counterparts: dict[int, Any] = {}
    for path, module in original.named_modules(remove_duplicate=False):
        if path in modules:
            counterparts[id(module)] = modules[path]
            own = tensors_of(modules[path])
            counterparts |= {
                id(one): own[name] for name, one in tensors_of(module).items() if own.get(name) is not None
            }
    copies = _Copies(thing, counterparts)
    return copies.of(thing) if copies.reaches_any(counterparts) else thing


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from (tensor for tensor in tensors_of(module).values() if tensor is not None)
    yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor) and value.is_meta)


def _parts(thing: Any) -> Iterable[Any]:
    """What an object holds, as far as it can be followed."""
    if type(thing) in _COMMON_TABLES:
        return (*thing.keys(), *thing.values())
    if isinstance(thing, (*_ATOMS, torch.Tensor)):
        return ()
    if isinstance(thing, Mapping):
        return (*thing.keys(), *thing.values()) if isinstance(thing, dict) else ()
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        return tuple(thing)
    if isinstance(thing, types.MethodType):
        return (thing.__self__, thing.__func__)
    if isinstance(thing, functools.partial):
        return (thing.func, thing.args, thing.keywords)
    if isinstance(thing, types.FunctionType):
        return (*_closed_over(thing).values(), *_globals_of(thing).values(), thing.__defaults__, thing.__kwdefaults__)
    return () if _is_of_library(type(thing)) and not isinstance(thing, nn.Module) else _attributes(thing).values()


def _attributes(thing: Any) -> Mapping[str, Any]:
    attributes = getattr(thing, "__dict__", None)
    return attributes if isinstance(attributes, dict) else {}


def _closed_over(function: types.FunctionType) -> dict[int, Any]:
    """The values of a closure by place; a name that has no value yet has no place."""
    closed: dict[int, Any] = {}
    for place, cell in enumerate(function.__closure__ or ()):
        try:
            closed[place] = cell.cell_contents
        except ValueError:
            continue
    return closed


def _globals_of(function: types.FunctionType) -> dict[str, Any]:
    """What the global names in a user's function mean."""
    if _is_of_library(function):
        return {}
    return {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}


def _is_of_library(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith(_LIBRARIES)


def _without_contents(thing: Any) -> Any:
    """A new object of the kind, which is to be filled: empty, or a shallow copy."""
    kind: Any = type(thing)
    empty = _EMPTY.get(kind)
    if empty is not None:
        return empty()
    if isinstance(thing, nn.Module):
        return object.__new__(_without_finalizer(kind))
    if kind.__new__ is not object.__new__:
        return thing if hasattr(kind, "__del__") else copy.copy(thing)
    copied: Any = object.__new__(_without_finalizer(kind))
    for name, entry in _slots(thing):
        object.__setattr__(copied, name, entry)
    return copied


@functools.cache
def _without_finalizer(kind: Any) -> Any:
    """A class whose objects are freed without running code of ``kind``."""
    if not hasattr(kind, "__del__"):
        return kind
    names = {"__del__": lambda _: None, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names)


def _slots(thing: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds beside its ``__dict__``, by name."""
    for kind in type(thing).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # one that is not set
                    yield name, member.__get__(thing)


class _Copies:
    """Copies of what is reached from ``root``, one for each object; those of ``counterparts`` are there, by id."""

    def __init__(self, root: Any, counterparts: Mapping[int, Any]) -> None:
        self._copies: dict[int, Any] = dict(counterparts)
        self._objects: dict[int, Any] = {id(root): root}
        self._copied = self._reached(root)

    def reaches_any(self, things: Iterable[int]) -> bool:
        """Whether any of these objects is reached, by id."""
        return not self._objects.keys().isdisjoint(things)

    def _reached(self, root: Any) -> set[int]:
        """Identities of all modules, of what leads to one or to a tensor with a copy, and of containers in modules."""
        holders: dict[int, list[int]] = {}
        stack: list[Any] = [root]
        contained = {id(root)}
        while stack:
            thing = stack.pop()
            for part in _parts(thing):
                if type(part) in _COMMON_ATOMS or isinstance(part, _ATOMS):
                    continue
                holders.setdefault(id(part), []).append(id(thing))
                if id(part) in self._copies:
                    self._objects[id(part)] = part
                    continue
                is_contained = isinstance(part, nn.Module) or (id(thing) in contained and isinstance(part, _CONTAINERS))
                if id(part) not in self._objects or (is_contained and id(part) not in contained):
                    self._objects[id(part)] = part
                    stack.append(part)
                    contained.update([id(part)] if is_contained else [])
        copied: set[int] = set()
        waiting = [*contained, *(self._copies.keys() & self._objects.keys())]
        while waiting:
            place = waiting.pop()
            if place not in copied:
                copied.add(place)
                waiting.extend(holders.get(place, ()))
        return copied

    def of(self, thing: Any) -> Any:
        """The copy of an object, or itself if it needs none."""
        if id(thing) in self._copies:
            return self._copies[id(thing)]
        if isinstance(thing, (*_ATOMS, torch.Tensor)) or id(thing) not in self._copied:
            return thing
        if isinstance(thing, types.FunctionType):
            return self._function(thing)
        if isinstance(thing, types.MethodType):
            return types.MethodType(self.of(thing.__func__), self.of(thing.__self__))
        if isinstance(thing, functools.partial):
            bound = type(thing)(self.of(thing.func), *map(self.of, thing.args), **self._entries(thing.keywords))
            vars(bound).update(vars(thing))
            return bound
        if isinstance(thing, (tuple, frozenset)):
            items = [self.of(item) for item in thing]
            return type(thing)(*items) if hasattr(thing, "_fields") else type(thing)(items)
        return self._object(thing)

    def _object(self, thing: Any) -> Any:
        """A copy of something that may hold itself: it is there before what it holds."""
        try:
            copied: Any = _without_contents(thing)
        except Exception:  # whatever an object raises that cannot be copied: it is shared
            copied = thing
        self._copies[id(thing)] = copied
        if copied is thing:
            return thing
        if isinstance(thing, dict):
            table: Any = OrderedDict if isinstance(thing, OrderedDict) else dict
            table.clear(copied)
            for key, value in thing.items():
                table.__setitem__(copied, self.of(key), self.of(value))
        elif isinstance(thing, (list, deque, set)):
            copied.clear()
            (copied.update if isinstance(thing, set) else copied.extend)([self.of(item) for item in thing])
        if _attributes(thing):
            vars(copied).update(self._entries(_attributes(thing)))
        return copied

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        names = {name for name, value in _globals_of(function).items() if id(value) in self._copied}
        meanings = dict(function.__globals__) if names else function.__globals__
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        copied = types.FunctionType(
            function.__code__, meanings, function.__name__, self.of(function.__defaults__), cells or None
        )
        functools.update_wrapper(copied, function, updated=())
        del vars(copied)["__wrapped__"]
        vars(copied).update(vars(function))
        self._copies[id(function)] = copied
        copied.__kwdefaults__ = self.of(function.__kwdefaults__)
        for place, value in _closed_over(function).items():
            cells[place].cell_contents = self.of(value)
        meanings.update({name: self.of(function.__globals__[name]) for name in names})
        return copied

    def _entries(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.of(value) for name, value in entries.items()}
