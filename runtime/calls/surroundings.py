"""Numbers, strings, flags and functions around a model that its code reads: globals, closures, class attributes.

They are constants of the programs, as attributes of the model are. One that has changed since the last call makes the
next call's program another one. Found by reading the code of ``forward`` and of the functions that it leads to; what
that code sets itself is not watched, nor is what installed packages hold.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.calls.code_reads import Chain, CodeReads, reads_of
from runtime.calls.held_values import Held, held, held_module
from runtime.torch_compat.host_state import dict_version

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_OURS = ("planner", "runtime", "passes", "cost_models")
#: Entries of a list, dict or set up to which it is compared by content.
_MAX_ENTRIES = 64
_CONSTRUCTORS = ("__init__", "__post_init__")
_ABSENT = object()


@dataclass
class _Variable:
    """A variable that code reads.

    Attributes:
        holder: the globals, cell or class that has it.
        name: its name there, then attributes to follow.
        words: what it is called.
        value: what it was last.
    """

    holder: Any
    name: Chain
    words: str
    value: Any

    def read(self) -> Any:
        return _follow(_entry(self.holder, self.name[0]), self.name[1:])

    @property
    def is_told_by_version(self) -> bool:
        """Whether it changes only with its holder's version."""
        return isinstance(self.holder, dict) and len(self.name) == 1 and not _changes_inside(self.value)


class Surroundings:
    """What the code of a model and its loss function reads around them.

    Attributes:
        changed: variables that are other than at first, by name, with what they are now.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None = None) -> None:
        self.changed: dict[str, Any] = {}
        self._names = _AttributeNames()
        self._first: dict[str, Any] = {}
        modules = [*model.modules(), *(loss_fn.modules() if isinstance(loss_fn, nn.Module) else ())]
        self._classes = tuple(dict.fromkeys(map(type, modules)))
        instance_forwards = [vars(module)["forward"] for module in modules if "forward" in vars(module)]
        self._roots = [*map(_forward_of, self._classes), *instance_forwards, loss_fn]
        self._collect()

    @property
    def key(self) -> Hashable:
        """A key that is equal as long as the variables' values are."""
        return tuple((words, type(value), _key(value)) for words, value in self.changed.items())

    def may_read(self, kind: type, name: str) -> bool:
        """Whether the code may read an attribute of a module of this class, and does not set it itself."""
        if name in self._names.written:
            return False
        is_of_library = any(_is_library(base) for base in kind.__mro__ if base not in (object, nn.Module))
        return is_of_library or self._names.reads_all or name in self._names.read

    def continue_from(self, before: Surroundings) -> None:
        """Go on comparing with what ``before`` saw at first."""
        self._first, self.changed = dict(before._first), dict(before.changed)

    def update(self) -> None:
        """Take up what changed since the last call."""
        changed = [one for one in self._loose if not _same(one.read(), one.value)]
        for place, (holder, version, variables) in enumerate(self._versioned):
            now = dict_version(holder)
            if now != version:
                self._versioned[place] = (holder, now, variables)
                changed += [one for one in variables if not _same(one.read(), one.value)]
        for variable in changed:
            self._note(variable, variable.read())
        if any(isinstance(variable.value, types.FunctionType) for variable in changed):
            self._collect()

    def _note(self, variable: _Variable, value: Any) -> None:
        first = self._first.setdefault(variable.words, variable.value)
        variable.value = _snapshot(value)
        if _same(value, first):
            self.changed.pop(variable.words, None)
        else:
            self.changed[variable.words] = variable.value

    def _collect(self) -> None:
        functions = list(_functions(self._roots, self._classes))
        self._names = _attribute_names(functions)
        read = _variables(functions, self._names.written, self._classes)
        variables = {(id(one.holder), one.name): one for one in read}
        by_holder: dict[int, tuple[Any, list[_Variable]]] = {}
        self._loose: list[_Variable] = []
        for variable in variables.values():
            if variable.is_told_by_version:
                by_holder.setdefault(id(variable.holder), (variable.holder, []))[1].append(variable)
            else:
                self._loose.append(variable)
        self._versioned = [(holder, dict_version(holder), some) for holder, some in by_holder.values()]


def _forward_of(kind: type) -> Any:
    """The user's own ``forward`` of a class, be it inside of one of ours."""
    forwards = (vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base))
    return next((forward for forward in forwards if not _is_library(forward)), None)


def in_words(value: Any) -> str:
    """A text of a value that is the same in every process."""
    if isinstance(value, types.FunctionType):
        return f"function {value.__qualname__}"
    if isinstance(value, Held):
        return value.words
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value)) if _is_watched(value) else f"a {type(value).__name__}"


@dataclass(frozen=True)
class _AttributeNames:
    """Names of attributes in the code of functions.

    Attributes:
        read, written: what it reads of anything, and sets; globals that it sets, too.
        reads_all: whether it computes names.
    """

    read: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    reads_all: bool = True


def _attribute_names(functions: Sequence[types.FunctionType]) -> _AttributeNames:
    """Constructors only set attributes of new objects."""
    reads = [reads_of(function.__code__) for function in functions]
    writers = [each for each, of in zip(reads, functions) if of.__name__ not in _CONSTRUCTORS]
    read = frozenset[str]().union(*(each.attributes for each in reads))
    computes = any(("getattr",) in each.globals or ("vars",) in each.globals for each in reads)
    return _AttributeNames(
        read, frozenset[str]().union(*(each.written for each in writers)), computes or "__dict__" in read
    )


def _variables(
    functions: Sequence[types.FunctionType], written: frozenset[str], classes: tuple[type, ...]
) -> Iterator[_Variable]:
    """What the code of functions, and of modules of these classes, reads and does not set."""
    reads = [reads_of(function.__code__) for function in functions]
    rebound = set[str]().union(*(read.rebound for read in reads))
    filled = set[str]().union(*(read.filled for read in reads))
    for function, read in zip(functions, reads):
        for holder, chain, words in _chains(function, read):
            variable = _variable(holder, chain, words)
            if variable is None:
                continue
            is_set = chain[0] in (written if isinstance(holder, dict) else rebound) or written & set(variable.name[1:])
            is_filled = _changes_inside(variable.value) and chain[0] in filled
            if not is_set and not is_filled:
                yield variable
    attributes = set[str]().union(*(read.attributes for read in reads)) - written
    for kind in dict.fromkeys(base for some in classes for base in some.__mro__ if not _is_library(base)):
        for name in sorted(attributes & vars(kind).keys()):
            if not name.startswith("__") and _is_watched(vars(kind)[name]):
                yield _Variable(kind, (name,), f"{kind.__name__}.{name}", _snapshot(vars(kind)[name]))


def _functions(roots: list[Any], classes: tuple[type, ...]) -> Iterator[types.FunctionType]:
    """Python functions that a call of ``roots`` may run, as far as names tell; each once."""
    todo, visited = list(roots), set[int]()
    while todo:
        for function in _unwrapped(todo.pop()):
            if id(function) in visited or _is_library(function):
                continue
            visited.add(id(function))
            yield function
            read = reads_of(function.__code__)
            for holder, chain, _ in _chains(function, read):
                todo += [value for value in _along(holder, chain) if isinstance(value, (types.FunctionType, type))]
            for name in read.attributes:
                todo += [vars(base)[name] for kind in classes for base in kind.__mro__ if name in vars(base)]


def _unwrapped(value: Any) -> Iterator[types.FunctionType]:
    """The functions behind a method, a property, a partial, a class or what wraps another."""
    if isinstance(value, types.FunctionType):
        yield value
        yield from _unwrapped(getattr(value, "__wrapped__", None))
    elif isinstance(value, type) and not _is_library(value):
        yield from (entry for entry in vars(value).values() if isinstance(entry, types.FunctionType))
    elif isinstance(value, property):
        yield from _unwrapped(value.fget)
    else:
        inner = getattr(value, "__func__", None) or getattr(value, "func", None)
        if inner is not None and inner is not value and not isinstance(value, torch.Tensor):
            yield from _unwrapped(inner)
        else:
            yield from (vars(kind)["__call__"] for kind in type(value).__mro__ if _is_called_by(kind))


def _is_called_by(kind: type) -> bool:
    return isinstance(vars(kind).get("__call__"), types.FunctionType) and not _is_library(kind)


def _chains(function: types.FunctionType, read: CodeReads) -> Iterator[tuple[Any, Chain, str]]:
    """Holder, name and words of what a function's code reads by name."""
    for chain in read.globals:
        if chain[0] in function.__globals__:
            yield function.__globals__, chain, f"{function.__module__}.{'.'.join(chain)}"
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    for chain in read.enclosing:
        if chain[0] in cells:
            yield cells[chain[0]], chain, f"{'.'.join(chain)} around {function.__qualname__}"


def _along(holder: Any, chain: Chain) -> Iterator[Any]:
    """The value of every name of a chain, as far as they are there."""
    value = _entry(holder, chain[0])
    for name in chain[1:]:
        yield value
        value = _follow(value, (name,))
    yield value


def _variable(holder: Any, chain: Chain, words: str) -> _Variable | None:
    """The variable that a chain leads to: its first value that can be compared."""
    for length, value in enumerate(_along(holder, chain), 1):
        if isinstance(value, types.ModuleType) and _is_library(value):
            return None
        if length == len(chain) and _is_called_object(value):
            content = _snapshot(value)
            return _Variable(holder, chain, words, content) if isinstance(content, Held) else None
        if value is not _ABSENT and _is_watched(value):
            left_out = len(chain) - length
            short = words if not left_out else words.replace(".".join(chain), ".".join(chain[:length]), 1)
            return _Variable(holder, chain[:length], short, _snapshot(value))
    return None


def _is_called_object(value: Any) -> bool:
    """Whether code may call an object of a user's class, or a module."""
    if isinstance(value, nn.Module):
        return True
    return (
        callable(value)
        and hasattr(value, "__dict__")
        and not (isinstance(value, (type, types.FunctionType)) or _is_library(type(value)))
    )


def _entry(holder: Any, name: str) -> Any:
    """What stands under a name in globals, in a class, or (whatever the name) in a cell."""
    if isinstance(holder, dict):
        return holder.get(name, _ABSENT)
    if isinstance(holder, types.CellType):
        try:
            return holder.cell_contents
        except ValueError:
            return _ABSENT
    return vars(holder).get(name, _ABSENT)


def _follow(value: Any, names: Chain) -> Any:
    """Look up attributes of attributes without running any code."""
    for name in names:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and name in attributes:
            value = attributes[name]
            continue
        kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
        value = next((vars(kind)[name] for kind in kinds if name in vars(kind)), _ABSENT)
    return value


def _is_library(value: Any) -> bool:
    """Whether a module, or what a class or function is from, is an installed package."""
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return isinstance(module, str) and _is_installed(module)


@functools.cache
def _is_installed(module: str) -> bool:
    if module.partition(".")[0] in _OURS:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file.startswith(_installed()) if file else module != "__main__" and module in sys.builtin_module_names


@functools.cache
def _installed() -> tuple[str, ...]:
    """Folders of the standard library and of packages that pip put there, be it not this environment's own folder.

    That is what virtual environments with the system's packages have, and folders of ``pip install --target``.
    """
    own = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    others = {entry for entry in sys.path if entry and next(Path(entry).glob("*.dist-info"), None) is not None}
    return tuple(os.path.join(folder, "") for folder in own | others)


def _changes_inside(value: Any) -> bool:
    """Whether what stands under a name may change without another value put there."""
    return not value.is_fixed if isinstance(value, Held) else isinstance(value, (list, dict, set))


def _is_watched(value: Any) -> bool:
    if held(value) is not None:
        return True
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        entries = [*value, *value.values()] if isinstance(value, dict) else list(value)
        return len(entries) <= _MAX_ENTRIES and all(isinstance(entry, _PLAIN) for entry in entries)
    return isinstance(value, _PLAIN) or (isinstance(value, types.FunctionType) and not _is_library(value))


def _snapshot(value: Any) -> Any:
    """What a value is compared by: plain ones as they are, tensors and modules without keeping them alive."""
    if isinstance(value, nn.Module):
        return held_module(value)
    content = None if isinstance(value, types.FunctionType) else held(value, in_objects=callable(value))
    if content is not None:
        return content
    return type(value)(value) if type(value) in (list, dict, set) else value


def _same(value: Any, before: Any) -> bool:
    if value is before:
        return True
    if isinstance(before, Held):
        return bool(_snapshot(value) == before)
    return type(value) is type(before) and isinstance(value, (*_PLAIN, list, tuple, dict, set)) and value == before


def _key(value: Any) -> Hashable:
    if isinstance(value, Held):
        return value
    return repr(value) if _is_watched(value) and not isinstance(value, types.FunctionType) else id(value)
