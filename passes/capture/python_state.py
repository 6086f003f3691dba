"""State in Python that a model's forward changes: a program computes what one call did and changes none of it."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from passes.ir.errors import CaptureError

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MAX_ENTRIES = 256
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

#: (path of the module, attribute) → its value, or what a container held.
State = Mapping[tuple[str, str], Any]
#: The same for attributes that a call changed → (value before, value after).
Changes = Mapping[tuple[str, str], tuple[Any, Any]]


def plain_state(model: nn.Module) -> State:
    """The numbers, strings and flags among the attributes of all modules, and those in their lists and dicts."""
    return {
        (path, name): _copied(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE and isinstance(value, (*_PLAIN, list, dict, set))
    }


def changes(before: State, after: State) -> Changes:
    """What differs. An attribute that appears is what a model keeps for its next call."""
    return {
        place: (before[place], after[place])
        for place in before
        if place in after and (type(before[place]), before[place]) != (type(after[place]), after[place])
    }


def describe(changed: Changes) -> str:
    """``'calls' of module 'block' (0 → 1)`` for the first of the changes."""
    (path, name), (old, new) = next(iter(changed.items()))
    return f"{name!r} of module {path!r} ({_short(old)} → {_short(new)})"


def set_attributes(model: nn.Module, changed: Changes) -> None:
    """Give plain attributes, which export puts back, the values they had after a call; lists and dicts have them."""
    for (path, name), (_, new) in changed.items():
        if isinstance(new, _PLAIN):
            vars(model.get_submodule(path))[name] = new


@contextlib.contextmanager
def no_python_draws() -> Iterator[None]:
    """Raise CaptureError at the end of the block if it drew from Python's or numpy's random numbers."""
    before = _generators()
    yield
    for name, state in _generators().items():
        if name in before and before[name] != state:
            raise CaptureError(
                f"forward draws from {name}, which would be drawn once, while tracing, and never again: draw with "
                "torch (torch.rand), or draw outside and pass the number as an argument"
            )


def _generators() -> dict[str, Any]:
    states: dict[str, Any] = {"Python's random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = (name, keys.tobytes(), *rest)
    return states


def _copied(value: Any) -> Any:
    """A container as its plain entries (what else it holds, by class), anything else itself."""
    if isinstance(value, dict):
        return {key: _entry(entry) for key, entry in list(value.items())[:_MAX_ENTRIES]}
    if isinstance(value, (list, set)):
        return [len(value), *map(_entry, list(value)[:_MAX_ENTRIES])]
    return value


def _entry(value: Any) -> Any:
    return value if isinstance(value, _PLAIN) else type(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 30 else f"{text[:27]}…"
