"""What people registered in this process, in words: for ranks to compare, and for the keys of what is cached.

A registration belongs to the process. Two processes work together, and a cached file is used again, only where these
words are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from types import CodeType, MappingProxyType
from typing import Any

_REGISTRATIONS: dict[str, dict[str, str]] = {}


def note(kind: str, name: str, words: str) -> None:
    """Remember that ``name`` of ``kind`` ("sharding rule", "schedule", …) was registered as ``words`` say."""
    _REGISTRATIONS.setdefault(kind, {})[name] = words


def registered(kind: str) -> Mapping[str, str]:
    """Name → words of everything of one kind, in the order of registration."""
    return MappingProxyType(_REGISTRATIONS.get(kind, {}))


def registrations_in_words() -> dict[str, str]:
    """Kind → one line for each registration, in their order; kinds of which there are none are left out."""
    return {
        kind: "\n".join(f"{name}: {words}" for name, words in entries.items())
        for kind, entries in sorted(_REGISTRATIONS.items())
        if entries
    }


def forget(kind: str, name: str) -> None:
    """Remove one registration; nothing happens if it is not there."""
    _REGISTRATIONS.get(kind, {}).pop(name, None)


def function_in_words(function: Callable[..., Any]) -> str:
    """A function by its name and a hash of its code, the same in every process that has the same source."""
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    parts = [_content(code), repr(function.__defaults__), repr(_captured(function))]
    return f"{name} {hashlib.sha256(''.join(parts).encode()).hexdigest()[:16]}"


def _content(code: CodeType) -> str:
    """What a function does, without where it is written."""
    constants = [_content(item) if isinstance(item, CodeType) else repr(item) for item in code.co_consts]
    return repr((code.co_code.hex(), code.co_names, code.co_varnames, constants))


def _captured(function: Any) -> list[Any]:
    """Numbers and texts that a function has from around it; other things have no words of their own."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [item if isinstance(item, (bool, int, float, str, type(None))) else type(item).__name__ for item in cells]
