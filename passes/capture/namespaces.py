"""Where functions may have been imported by their names."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Set
from typing import Any


def namespaces_with(names: Set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, global names) of every imported module that has one of ``names``; there are thousands of modules."""
    for path, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        if namespace and not namespace.keys().isdisjoint(names):
            yield path, namespace
