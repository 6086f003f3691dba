"""What holds state in Python that a model's forward may change.

Modules, lists, dicts, sets, objects with attributes, the user's classes, and what their functions close over or name.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from passes.torch_compat.module_tables import buffers_of

_SEQUENCES = (list, deque)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, torch.Tensor, torch.dtype,
          torch.device, types.BuiltinFunctionType)  # fmt: skip
#: Packages whose objects keep their state to themselves.
_LIBRARIES = frozenset(sys.stdlib_module_names - {"__main__", "types", "collections"}) | {
    "torch",
    "numpy",
    "transformers",
}
#: What tracing puts into the copy of a model, and plans, graphs and programs, which a loss reaches through a trainer.
_OURS = ("passes.", "cost_models.", "runtime.")
#: Attributes in which transformers notes that its hooks are on a model, and torch an LSTM's weights once more.
NOTES_OF_LIBRARIES = frozenset({"_output_capturing_hooks_installed", "_flat_weights", "_flat_weight_refs"})
#: Classes whose objects say what a model is; what a forward notes in them, it notes once.
_DESCRIPTIONS = frozenset({"PreTrainedConfig", "PretrainedConfig", "GenerationConfig"})
#: Most of what a model holds, told at once by its exact type.
_COMMON_ATOMS = frozenset((bool, int, float, str, type(None), torch.Tensor, torch.nn.Parameter))
_MAX_ENTRIES = 1024
_MAX_HOLDERS = 100_000


@dataclass(frozen=True)
class StateHolder:
    """Something whose contents can change in place.

    Attributes:
        thing: a module, list, deque, dict, set, object with attributes, class, or function.
        module: path of the module it was reached from.
        name: attributes and keys that lead to it from there; empty for the module.
    """

    thing: Any
    module: str
    name: str

    def contents(self) -> Any:
        """A shallow copy: a list, a set, or a dict by key, by attribute, or by name in a function."""
        if isinstance(self.thing, _SEQUENCES):
            return list(self.thing)
        if isinstance(self.thing, set):
            return set(self.thing)
        return _table(self.thing)

    def put_back(self, contents: Any) -> None:
        """Make the contents what ``contents()`` returned."""
        thing = self.thing
        if isinstance(thing, types.FunctionType):
            _put_names(thing, contents)
        elif isinstance(thing, _SEQUENCES):
            thing.clear()
            thing.extend(contents)
        elif isinstance(thing, set):
            thing.clear()
            thing.update(contents)
        elif isinstance(thing, dict):
            table: Any = OrderedDict if isinstance(thing, OrderedDict) else dict
            table.clear(thing)
            for key, value in contents.items():
                table.__setitem__(thing, key, value)
        else:
            _put_attributes(thing, contents)

    def name_of(self, key: Any) -> str:
        """How a reader would write an entry: ``cache``, ``cache['mask']``, ``box.count``."""
        if not self.name:
            return str(key)
        if isinstance(self.thing, (dict, *_SEQUENCES)):
            return f"{self.name}[{key!r}]"
        return f"{self.name}.{key}"


def state_holders(model: nn.Module, *others: Any) -> dict[int, StateHolder]:
    """By identity, what the modules of ``model`` and ``others`` (functions that are called with it) reach.

    Modules come first and what lies nearer to one before what lies farther; parameters, tensors, classes and what
    libraries keep to themselves are left out.
    """
    holders: dict[int, StateHolder] = {}
    waiting: deque[StateHolder] = deque()
    for path, module in model.named_modules():
        waiting.append(StateHolder(module, path, ""))
        waiting.append(StateHolder(buffers_of(module), path, ""))
    waiting.extend(_code_of_users(model))
    waiting.extend(StateHolder(part, "", name) for other in others for name, part in _held("loss_fn", other))
    while waiting and len(holders) < _MAX_HOLDERS:
        holder = waiting.popleft()
        if id(holder.thing) in holders:
            continue
        holders[id(holder.thing)] = holder
        for key, value in _entries(holder):
            if type(value) in _COMMON_ATOMS:
                continue
            waiting.extend(StateHolder(part, holder.module, name) for name, part in _held(holder.name_of(key), value))
    return holders


def _code_of_users(model: nn.Module) -> Iterator[StateHolder]:
    """Classes of the modules that no library has, and their functions."""
    seen: set[type] = set()
    for path, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind not in seen and not _is_of_library(kind):
                seen.add(kind)
                yield StateHolder(kind, path, kind.__name__)
                functions = (value for value in vars(kind).values() if isinstance(value, types.FunctionType))
                yield from (StateHolder(function, path, "") for function in functions)


def _held(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What can change in place in ``value``: itself, or what a tuple, method or partial of it holds."""
    if isinstance(value, _ATOMS):
        return
    if isinstance(value, tuple):
        for place, item in enumerate(value[:_MAX_ENTRIES]):
            yield from _held(f"{name}[{place}]", item)
    elif isinstance(value, types.MethodType):
        yield from _held(name, value.__self__)
    elif isinstance(value, functools.partial):
        yield from _held(name, (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, types.FunctionType):
        if value.__closure__ or not _is_of_library(value):
            yield "", value
    elif isinstance(value, nn.Module):
        for path, module in value.named_modules():
            inner = f"{name}.{path}" if path else name
            yield from ((inner, module), (inner, buffers_of(module)))
    elif isinstance(value, (*_SEQUENCES, dict, set)) or _has_state(value):
        yield name, value


def _has_state(value: Any) -> bool:
    kinds = type(value).__mro__
    if any(kind.__name__ in _DESCRIPTIONS for kind in kinds) or _is_of_library(type(value)):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _is_of_library(thing: Any) -> bool:
    name = str(getattr(thing, "__module__", ""))
    return name.split(".")[0] in _LIBRARIES or name.startswith(_OURS)


def _entries(holder: StateHolder) -> Iterable[tuple[Any, Any]]:
    contents = holder.contents()
    pairs: Iterable[tuple[Any, Any]] = contents.items() if isinstance(contents, dict) else enumerate(contents)
    return (pair for _, pair in zip(range(_MAX_ENTRIES), pairs))


def _table(thing: Any) -> dict[Any, Any]:
    if isinstance(thing, dict):
        return dict(thing)
    if isinstance(thing, types.FunctionType):
        return {**_globals_of(thing), **_closed_over(thing)}
    if isinstance(thing, type):
        return {name: value for name, value in vars(thing).items() if not name.startswith("__")}
    hidden = _OF_EVERY_MODULE | NOTES_OF_LIBRARIES if isinstance(thing, nn.Module) else frozenset()
    return {name: value for name, value in vars(thing).items() if name not in hidden}


def _closed_over(function: types.FunctionType) -> dict[str, Any]:
    """The values of a closure by name; a name that has no value yet is left out."""
    closed: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            closed[name] = cell.cell_contents
        except ValueError:
            continue
    return closed


def _globals_of(function: types.FunctionType) -> dict[str, Any]:
    """What the global names in a user's function mean."""
    if _is_of_library(function):
        return {}
    meanings = function.__globals__
    return {name: meanings[name] for name in function.__code__.co_names if name in meanings}


def _put_names(function: types.FunctionType, contents: dict[str, Any]) -> None:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        if name in contents:
            cell.cell_contents = contents[name]
    closed = frozenset(function.__code__.co_freevars)
    function.__globals__.update({name: value for name, value in contents.items() if name not in closed})


def _put_attributes(thing: Any, contents: dict[str, Any]) -> None:
    now = _table(thing)
    for name in now.keys() - contents.keys():
        delattr(thing, name) if isinstance(thing, type) else vars(thing).pop(name)
    changed = {name: value for name, value in contents.items() if now.get(name, now) is not value}
    if isinstance(thing, type):
        for name, value in changed.items():
            setattr(thing, name, value)
    else:
        vars(thing).update(changed)
