"""Where functions may have been imported by their names."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def namespaces_with(names: Set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, global names) of every imported module that has one of ``names``; there are thousands of modules.

    Modules of libraries that have none are looked at again once there are other modules, or other numbers of names.
    """
    key = frozenset(names)
    if key not in _looked_through or _looked_through[key].is_outdated():
        _looked_through[key] = _Namespaces.with_any(names)
    for path, namespace in _looked_through[key].others:
        if not namespace.keys().isdisjoint(names):
            yield path, namespace


@dataclass(frozen=True)
class _Namespaces:
    """Global names of all modules, when they were looked through for some.

    Attributes:
        without: those of libraries that had none.
        sizes: their numbers of names.
        others: those of all other modules, by path.
    """

    modules: list[Any]
    without: list[dict[str, Any]]
    sizes: list[int]
    others: list[tuple[str, dict[str, Any]]]

    @classmethod
    def with_any(cls, names: Set[str]) -> _Namespaces:
        modules = dict(sys.modules)
        without, others = [], []
        for path, module in modules.items():
            namespace = getattr(module, "__dict__", None)
            if not namespace:
                continue
            if str(namespace.get("__file__")).startswith(_LIBRARIES) and namespace.keys().isdisjoint(names):
                without.append(namespace)
            else:
                others.append((path, namespace))
        return cls([*modules.values()], without, [*map(len, without)], others)

    def is_outdated(self) -> bool:
        return [*sys.modules.values()] != self.modules or [*map(len, self.without)] != self.sizes


#: What was found for some names, when they were last asked for.
_looked_through: dict[frozenset[str], _Namespaces] = {}
