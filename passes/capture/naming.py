"""Readable, unique Python identifiers for values."""

from __future__ import annotations

import builtins
import functools
import keyword
import re
from collections import Counter
from collections.abc import Sequence

from passes.capture.nested_values import Path

#: Names that emitted source uses itself.
_OURS = ("torch", "F", "spmd", "ops", "kernels", "math", "I", "P", "R", "S", "V", "w", "self")
#: Names that mean something else there.
_TAKEN = {*_OURS, *keyword.kwlist, *dir(builtins)}


class Namer:
    """Hands out identifiers: the wished one, or with a number appended."""

    def __init__(self) -> None:
        self._used = set(_TAKEN)
        self._next: dict[str, int] = {}

    def name(self, wish: str) -> str:
        base = identifier(wish)
        if base not in self._used:
            self._used.add(base)
            return base
        number = self._next.get(base, 1)
        while f"{base}_{number}" in self._used:
            number += 1
        self._next[base] = number + 1
        self._used.add(f"{base}_{number}")
        return f"{base}_{number}"


@functools.lru_cache(maxsize=4096)
def identifier(wish: str) -> str:
    """The identifier nearest to ``wish``."""
    base = re.sub(r"\W+", "_", wish).strip("_") or "value"
    return f"x{base}" if base[0].isdigit() else base


def input_name(path: Path, parameters: Sequence[str]) -> str:
    """The name of the input at ``path`` of a call's arguments, by the names of forward's parameters."""
    first = path[0]
    if isinstance(first, int):
        first = parameters[first] if first < len(parameters) else f"input_{first}"
    return "_".join(map(str, (first, *path[1:])))


def name_wishes(calls: Sequence[tuple[str, str]]) -> list[str]:
    """The name wished for each call's value: that of its module if it is the only call there, else the operator's.

    Args:
        calls: (path of the module, operator) of every call of the graph.
    """
    calls_in = Counter(path for path, _ in calls)
    parents = {".".join(parts[:end]) for path in calls_in for parts in [path.split(".")] for end in range(len(parts))}
    wishes = []
    for path, op in calls:
        leaf = path.rpartition(".")[2]
        alone = calls_in[path] == 1 and path not in parents and leaf and not leaf.isdigit()
        wishes.append(leaf if alone else op.split(".")[op.count(".") > 0].strip("_"))
    return wishes
