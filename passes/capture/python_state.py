"""State in Python that a model's forward changes: a program computes what one call did and changes none of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from passes.capture.state_holders import StateHolder, state_holders
from passes.ir.errors import CaptureError
from passes.torch_compat.module_tables import buffers_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
#: (kind, name) of parameters and buffers by the identity of the tensors that stand for them in a trace.
TracedStates = Mapping[int, tuple[str, str]]


@dataclass(frozen=True)
class StateChanges:
    """What a call changed.

    Attributes:
        entries: (place, value before, value after): ``'calls' of module 'block'``, 0, 1.
        after: all that holds state, with its contents after the call. Tracing has lists and dicts of its own, which
            only their modules' contents lead to.
        tensors: the tensors that the call put somewhere, in the order of their places.
        states: the traced parameters and buffers.
    """

    entries: list[tuple[str, Any, Any]] = field(default_factory=list)
    after: list[tuple[StateHolder, Any]] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    states: TracedStates = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.entries)

    def describe(self) -> str:
        """``'calls' of module 'block' (0 → 1)`` for the first of the changes."""
        place, old, new = self.entries[0]
        return f"{place} ({_short(old)} → {_short(new)})"

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[list[torch.Tensor]]:
        """Inside the block the state is what the next call of ``model`` would see.

        Yields:
            tensors without data, which are where the call put ``tensors``.
        """
        stand_ins = [_without_data(tensor) for tensor in self.tensors]
        replaced = {id(tensor): stand_in for tensor, stand_in in zip(self.tensors, stand_ins)}
        for identity, (kind, name) in self.states.items():
            replaced[identity] = model.get_parameter(name) if kind == "parameter" else model.get_buffer(name)
        before = [(holder, holder.contents()) for holder, _ in self.after]
        for holder, contents in self.after:
            holder.put_back(_with_tensors(contents, lambda tensor: replaced.get(id(tensor), tensor)))
        try:
            yield stand_ins
        finally:
            for holder, contents in before:
                holder.put_back(contents)


class WatchedState:
    """The state of a model, and of the functions called with it, before a call.

    Args:
        states: the parameters and buffers that are traced; their tensors are no state of Python.
    """

    def __init__(self, model: nn.Module, others: tuple[Any, ...], states: TracedStates) -> None:
        self._roots = (model, *others)
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._states = states
        self._before = [(holder, holder.contents()) for holder in state_holders(*self._roots).values()]

    def put_back(self) -> None:
        """Make the state what it was, also that of objects which a user holds."""
        for holder, contents in self._before:
            if _entries_changed(contents, holder.contents()):
                holder.put_back(contents)

    def _refuse_replaced_parameters(self) -> None:
        now = dict(self._roots[0].named_parameters(remove_duplicate=False))
        for name in (*self._parameters, *now):
            if now.get(name) is not self._parameters.get(name):
                raise CaptureError(
                    f"forward puts another tensor in the place of parameter {name!r}, which no optimizer has: write to "
                    "it (parameter.copy_(…) under torch.no_grad())"
                )

    def changes(self) -> StateChanges:
        """What differs now. What took the place of a buffer is written into the buffer where that can hold it."""
        self._refuse_replaced_parameters()
        _write_replaced_buffers(self._roots[0], self._before)
        found = StateChanges(states=self._states)
        before = {id(holder.thing): contents for holder, contents in self._before}
        old_tensors = {id(tensor) for _, contents in self._before for tensor in _tensors(contents)}
        placed: dict[int, torch.Tensor] = {}
        for identity, holder in state_holders(*self._roots).items():
            contents = holder.contents()
            if identity in before:
                changed = _entries_changed(before[identity], contents)
                found.entries.extend((_place(holder, key), old, new) for key, old, new in changed)
            found.after.append((holder, contents))
            for tensor in _tensors(contents):
                if id(tensor) not in old_tensors and id(tensor) not in self._states:
                    placed.setdefault(id(tensor), tensor)
        found.tensors.extend(placed.values())
        return found


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_ALL = object()
_NOTHING = _Nothing()


def _entries_changed(before: Any, after: Any) -> list[tuple[Any, Any, Any]]:
    """(key, old, new) of every entry that differs; one for a whole list or set."""
    if not isinstance(before, dict):
        return [] if _same_items(before, after) else [(_ALL, before, after)]
    keys = [*before, *(key for key in after if key not in before)]
    pairs = ((key, before.get(key, _NOTHING), after.get(key, _NOTHING)) for key in keys)
    return [(key, old, new) for key, old, new in pairs if not _same(old, new)]


def _same_items(before: Any, after: Any) -> bool:
    if isinstance(before, set):
        return bool(before == after)
    return len(before) == len(after) and all(map(_same, before, after))


def _same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if isinstance(old, tuple) and type(old) is type(new):
        return _same_items(old, new)
    return isinstance(old, _PLAIN) and type(old) is type(new) and bool(old == new)


def _place(holder: StateHolder, key: Any) -> str:
    name = holder.name if key is _ALL else holder.name_of(key)
    return f"{name!r} of module {holder.module!r}"


def _write_replaced_buffers(model: nn.Module, before: list[tuple[StateHolder, Any]]) -> None:
    tables = {id(buffers_of(module)) for module in model.modules()}
    for holder, contents in before:
        if id(holder.thing) not in tables:
            continue
        for name, new in holder.contents().items():
            old = contents.get(name)
            if new is not old and _can_hold(old, new):
                with torch.no_grad():
                    old.copy_(new)
                holder.thing[name] = old


def _can_hold(old: torch.Tensor | None, new: torch.Tensor | None) -> bool:
    return (
        old is not None
        and new is not None
        and not new.requires_grad
        and (old.shape, old.dtype) == (new.shape, new.dtype)
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in contents, also inside tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors_in_tuples(entry)
    else:
        for entry in value:
            yield from _tensors_in_tuples(entry)


def _tensors_in_tuples(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, (torch.Tensor, tuple)):
        yield from _tensors(value)


def _with_tensors(contents: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(contents, dict):
        return {key: _replaced(value, replace) for key, value in contents.items()}
    return type(contents)(_replaced(value, replace) for value in contents)


def _replaced(value: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return replace(value)
    if isinstance(value, tuple):
        items = [_replaced(item, replace) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {[*value.shape]}"
    if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
        return f"{len(value)} entries"
    text = repr(value)
    return text if len(text) <= 30 else f"{text[:27]}…"
