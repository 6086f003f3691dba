"""Entries of a model's output that are fetched when they are read: what every kind of container does about them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

DEFERRED = "_deferred_entries"


class EntrySource(Protocol):
    """Where entries come from."""

    def entry(self, key: Any) -> Any:
        """The whole value of an entry, by its key, field or place."""

    def missing(self, key: Any) -> Exception:
        """Why there is no such entry."""


@dataclass
class DeferredEntries:
    """Entries of one output.

    Attributes:
        keys: of all that the model gives, in order.
        pending: those to fetch.
        absent: those that there are not.
        values: fetched ones.
        is_raw: methods of the model's class are reading what is there.
    """

    source: EntrySource
    keys: tuple[Any, ...]
    pending: set[Any]
    absent: frozenset[Any]
    values: dict[Any, Any] = field(default_factory=dict)
    is_raw: bool = False


def entry_keys(example: Any) -> tuple[Any, ...]:
    """Keys of a mapping, places in a sequence, or fields of a dataclass."""
    if isinstance(example, Mapping):
        return tuple(example)
    return tuple(range(len(example))) if isinstance(example, (tuple, list)) else field_names(type(example))


def field_names(kind: type) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        return tuple(one.name for one in dataclasses.fields(kind))
    return tuple(getattr(kind, "_fields", ()))


def attributes_of(value: Any) -> dict[str, Any]:
    """What an object has in its dict and its slots."""
    slots = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    attributes |= getattr(value, "__dict__", {})
    attributes.pop(DEFERRED, None)
    return attributes


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return tuple(name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))


def own_attributes(value: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = object.__getattribute__(value, "__dict__")
    return attributes


def entries_of(value: Any) -> DeferredEntries | None:
    """Entries to look after; None where the object is what it shows."""
    entries: DeferredEntries | None = own_attributes(value).get(DEFERRED)
    return None if entries is None or entries.is_raw else entries


def fetch(value: Any, *keys: Any) -> None:
    """Make entries whole, which all ranks must do.

    Raises:
        Exception: the source's, for an entry that there is not.
    """
    entries = entries_of(value)
    if entries is None:
        return
    for key in keys:
        if key in entries.absent:
            raise entries.source.missing(key)
        if key in entries.pending:
            entries.values[key] = entries.source.entry(key)
            entries.pending.discard(key)
            value._keep(key, entries.values[key])
    if value._keeps and not entries.pending and not entries.absent:
        del own_attributes(value)[DEFERRED]


def fetch_all(value: Any) -> None:
    entries = entries_of(value)
    if entries is not None:
        fetch(value, *(key for key in entries.keys if key in entries.pending))


@contextlib.contextmanager
def as_it_is(value: Any) -> Iterator[None]:
    """Inside the block methods of the model's class read what is there."""
    entries = entries_of(value)
    if entries is not None:
        entries.is_raw = True
    try:
        yield
    finally:
        if entries is not None:
            entries.is_raw = False
