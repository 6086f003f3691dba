"""Readable, unique Python identifiers for values."""

from __future__ import annotations

import builtins
import keyword
import re

#: Names that mean something else in emitted source.
_TAKEN = {"torch", "F", "spmd", "ops", "math", "I", "P", "R", "S", "V", "w", "self", *keyword.kwlist, *dir(builtins)}


class Namer:
    """Hands out identifiers: the wished one, or with a number appended."""

    def __init__(self) -> None:
        self._used = set(_TAKEN)
        self._next: dict[str, int] = {}

    def name(self, wish: str) -> str:
        base = re.sub(r"\W+", "_", wish).strip("_") or "value"
        base = f"x{base}" if base[0].isdigit() else base
        if base not in self._used:
            self._used.add(base)
            return base
        number = self._next.get(base, 1)
        while f"{base}_{number}" in self._used:
            number += 1
        self._next[base] = number + 1
        self._used.add(f"{base}_{number}")
        return f"{base}_{number}"
