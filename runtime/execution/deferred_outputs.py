"""A model's outputs whose values come when they are looked at, in an object of the model's own class.

``deferred`` gives an instance of a subclass of what the model returns (a dict, tuple, named tuple, list, dataclass,
``ModelOutput``, …). So ``isinstance``, unpacking, indexing, ``dataclasses.fields`` and pytrees do what they do with the
model's own output. Each entry is fetched when it is first read; what is made of such an object (a copy, a pickle,
``type(outputs)(…)``) is of the model's class itself.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, Mapping, MutableMapping, ValuesView
from typing import Any

from runtime.execution.deferred_entries import (
    DEFERRED,
    DeferredEntries,
    EntrySource,
    as_it_is,
    attributes_of,
    entries_of,
    entry_keys,
    fetch,
    fetch_all,
    field_names,
    own_attributes,
)
from runtime.torch_compat.pytrees import take_apart_like

#: Of a class that may have subclasses (Python's ``Py_TPFLAGS_BASETYPE``); those of ``torch.return_types`` may not.
_HAS_SUBCLASSES = 1 << 10


def can_be_deferred(example: Any) -> bool:
    """Whether ``deferred`` can make an object like this one."""
    return bool(type(example).__flags__ & _HAS_SUBCLASSES)


def deferred(example: Any, source: EntrySource, *, pending: Iterable[Any], absent: Iterable[Any] = ()) -> Any:
    """An object like ``example`` whose ``pending`` entries are fetched from ``source`` when they are read.

    Args:
        example: a container with stand-ins for those entries.
        pending, absent: by their keys (``entry_keys``); absent ones raise an error when they are read, and a mapping
            does not list them.
    """
    entries = DeferredEntries(source, entry_keys(example), set(pending), frozenset(absent))
    original: Any = type(example)
    instance = _copied(example, _deferred_class(original), without=entries.absent)
    own_attributes(instance)[DEFERRED] = entries
    return instance


def below(container: Any, key: Any, paths: Iterable[str]) -> list[str]:
    """Those of ``paths`` that are, or are part of, what ``container`` has at ``key``."""
    names = getattr(type(container), "_fields", None)
    head = str(names[key] if names and isinstance(key, int) else key)
    return [path for path in paths if path == head or path.startswith(f"{head}.")]


def as_original(value: Any) -> Any:
    """``value``; of the model's own class with all of its entries if they were deferred."""
    if not isinstance(value, _Deferred):
        return value
    fetch_all(value)
    content = tuple(value) if isinstance(value, tuple) else value
    with as_it_is(value):
        return _copied(content, value._original, attributes=attributes_of(value))


def _copied(
    example: Any, kind: type, *, without: Collection[Any] = (), attributes: Mapping[str, Any] | None = None
) -> Any:
    """An instance of ``kind`` with the content of ``example``, made without running constructors."""
    instance: Any
    if isinstance(example, tuple):
        instance = tuple.__new__(kind, tuple(example))
    elif isinstance(example, list):
        instance = list.__new__(kind)
        list.extend(instance, list.__iter__(example))
    elif isinstance(example, dict):
        builtin: Any = OrderedDict if isinstance(example, OrderedDict) else dict
        instance = builtin.__new__(kind)
        for key in [key for key in builtin.__iter__(example) if key not in without]:
            builtin.__setitem__(instance, key, dict.__getitem__(example, key))
    else:
        instance = object.__new__(kind)
    for name, value in (attributes_of(example) if attributes is None else attributes).items():
        object.__setattr__(instance, name, value)
    return instance


class _Deferred:
    """Goes before the model's class among the bases."""

    _original: type
    #: Attributes that are entries.
    _entry_fields: frozenset[str] = frozenset()
    #: Whether fetched entries are put where the model's class looks for them.
    _keeps = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._original(*args, **kwargs)

    def __init_subclass__(cls) -> None:
        """Without what the model's class does about its subclasses."""

    def _keep(self, key: Any, whole: Any) -> None:
        object.__setattr__(self, key, whole)

    def _drop(self, key: Any) -> None:
        """Forget an entry that is written or deleted."""
        entries = entries_of(self)
        if entries is not None:
            entries.pending.discard(key)
            entries.values.pop(key, None)
            entries.absent -= {key}

    def __getattribute__(self, name: str) -> Any:
        if entries_of(self) is not None:
            if name == "__dict__":
                fetch_all(self)
            elif name in type(self)._entry_fields:
                return self._of_field(name)
        return super().__getattribute__(name)

    def _of_field(self, name: str) -> Any:
        fetch(self, name)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self._drop(name)

    def __repr__(self) -> str:
        """Without gathering, as one rank alone may print it."""
        with as_it_is(self):
            return super().__repr__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.copy, (as_original(self),)


class _DeferredMapping(_Deferred):
    """Of mappings; entries of all of them are also attributes, and have places."""

    def __getitem__(self, key: Any) -> Any:
        entries = entries_of(self)
        keys = tuple(self) if entries is None else entries.keys  # type: ignore[call-overload]
        if isinstance(key, slice):
            return tuple(self[one] for one in keys[key])
        if isinstance(key, int) and key not in keys:
            key = keys[key]
        if entries is None:
            return self._read(key)
        fetch(self, key)
        return entries.values[key] if key in entries.values else self._read(key)

    def _read(self, key: Any) -> Any:
        with as_it_is(self):
            return super().__getitem__(key)  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self or self._lacks(name):  # type: ignore[operator]
            return self[name]
        raise AttributeError(f"the model's output has no {name!r}, only {', '.join(map(str, self))}")  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[Any]:  # in Python, so that ``dict(outputs)`` asks for each entry
        return super().__iter__()  # type: ignore[misc]

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self or self._lacks(key) else default  # type: ignore[operator]

    def _lacks(self, key: Any) -> bool:
        entries = entries_of(self)
        return entries is not None and key in entries.absent

    def items(self) -> Any:
        return super().items() if entries_of(self) is None else ItemsView(self)  # type: ignore

    def values(self) -> Any:
        return super().values() if entries_of(self) is None else ValuesView(self)  # type: ignore

    def to_tuple(self) -> tuple[Any, ...]:
        """All values."""
        return tuple(self[key] for key in self)  # type: ignore[attr-defined]

    def __setitem__(self, key: Any, value: Any) -> None:
        with as_it_is(self):
            super().__setitem__(key, value)  # type: ignore[misc]
        self._drop(key)

    def __delitem__(self, key: Any) -> None:
        with as_it_is(self):
            super().__delitem__(key)  # type: ignore[misc]
        self._drop(key)


class _DeferredDict(_DeferredMapping):
    _keeps = True

    def _keep(self, key: Any, whole: Any) -> None:
        dict.__setitem__(self, key, whole)  # type: ignore[index, type-var]
        if key in type(self)._entry_fields:
            object.__setattr__(self, key, whole)


class _DeferredOtherMapping(_DeferredMapping):
    """Of mappings that keep their entries in attributes."""

    _keeps = False

    def _keep(self, key: Any, whole: Any) -> None:
        if isinstance(self, MutableMapping):
            with as_it_is(self):
                super().__setitem__(key, whole)

    def __getattribute__(self, name: str) -> Any:
        if entries_of(self) is not None and name in own_attributes(self):
            fetch_all(self)
        return super().__getattribute__(name)

    def __len__(self) -> int:
        with as_it_is(self):
            return super().__len__()  # type: ignore[misc, no-any-return]

    def __contains__(self, key: Any) -> bool:
        entries = entries_of(self)
        if entries is None:
            return super().__contains__(key)  # type: ignore[misc, no-any-return]
        return any(key == one for one in self)

    def __iter__(self) -> Iterator[Any]:
        with as_it_is(self):
            keys = list(super().__iter__())
        return iter(keys)


class _DeferredSequence(_Deferred):
    def __getitem__(self, place: Any) -> Any:
        entries = entries_of(self)
        if entries is None:
            return super().__getitem__(place)  # type: ignore[misc]
        if isinstance(place, slice):
            parts = [self._at(one) for one in entries.keys[place]]
            return parts if isinstance(self, list) else tuple(parts)
        place = entries.keys[place]
        fetch(self, place)
        return self._at(place)

    def _at(self, place: int) -> Any:
        """An entry, or what stands for one that there is not."""
        entries = entries_of(self)
        if entries is not None and place not in entries.absent:
            fetch(self, place)
        with as_it_is(self):
            is_fetched = entries is not None and place in entries.values
            return entries.values[place] if is_fetched else super().__getitem__(place)  # type: ignore

    def __iter__(self) -> Iterator[Any]:
        entries = entries_of(self)
        return super().__iter__() if entries is None else map(self._at, entries.keys)  # type: ignore[misc]

    def _of_field(self, name: str) -> Any:
        return self[type(self)._fields.index(name)]  # type: ignore[attr-defined]

    def __contains__(self, value: Any) -> bool:
        return any(value is one or value == one for one in self)  # type: ignore[attr-defined]

    def __radd__(self, other: Any) -> Any:
        return other + as_original(self)


class _DeferredTuple(_DeferredSequence):
    _keeps = False

    def _keep(self, key: Any, whole: Any) -> None:
        """In C nothing is written into a tuple."""

    def __hash__(self) -> int:
        return hash(as_original(self))

    def __repr__(self) -> str:
        entries = own_attributes(self)[DEFERRED]
        shown = [entries.values.get(place, tuple.__getitem__(self, place)) for place in entries.keys]  # type: ignore
        return repr(tuple.__new__(self._original, shown))


class _DeferredList(_DeferredSequence):
    def _keep(self, key: Any, whole: Any) -> None:
        list.__setitem__(self, key, whole)  # type: ignore[call-overload]


#: Methods in C that read entries: they are run on the whole.
_READERS: dict[type, tuple[str, ...]] = {
    dict: ("copy", "__eq__", "__ne__", "__or__", "__ror__"),
    tuple: ("count", "index", "__eq__", "__ne__", "__add__", "__mul__", "__rmul__"),
    list: ("copy", "count", "index", "__eq__", "__ne__", "__add__", "__mul__", "__rmul__", "__reversed__"),
}
#: Methods in C that change the object: all is fetched first.
_WRITERS: dict[type, tuple[str, ...]] = {
    dict: ("pop", "popitem", "setdefault", "update", "clear", "__ior__"),
    list: ("append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort", "__setitem__", "__delitem__",
           "__iadd__", "__imul__"),
}  # fmt: skip


def _reader(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(as_original(self), name)(*map(as_original, args))


def _writer(name: str) -> Callable[..., Any]:
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        fetch_all(self)
        own_attributes(self).pop(DEFERRED, None)
        return getattr(super(type(self), self), name)(*args, **kwargs)

    return write


@functools.cache
def _deferred_class(original: Any) -> type:
    """The subclass of ``original`` whose entries are fetched when they are read."""
    mixin: type = _Deferred
    if issubclass(original, Mapping):
        mixin = _DeferredDict if issubclass(original, dict) else _DeferredOtherMapping
    elif issubclass(original, (tuple, list)):
        mixin = _DeferredTuple if issubclass(original, tuple) else _DeferredList
    builtin: type = next((kind for kind in (dict, tuple, list) if issubclass(original, kind)), object)
    methods: dict[str, Any] = {name: _reader(name) for name in _READERS.get(builtin, ())}
    methods |= {name: _writer(name) for name in _WRITERS.get(builtin, ())}
    if builtin is tuple:
        methods["__hash__"] = _DeferredTuple.__hash__
    facts = {
        "_original": original,
        "_entry_fields": frozenset(field_names(original)),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    kind = type(original.__name__, (mixin, original), {**facts, **methods})
    take_apart_like(kind, original, as_original)
    return kind
