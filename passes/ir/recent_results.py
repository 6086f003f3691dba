"""Results by key, for functions whose arguments have no hash of their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
_ABSENT: Any = object()


class RecentResults(Generic[Result]):
    """The last ``size`` results that were asked for. The key must say everything that a result depends on."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._results: dict[Hashable, Result] = {}

    def get(self, key: Hashable, compute: Callable[[], Result]) -> Result:
        """The result of ``key``; ``compute`` gives one that is not there, and what it raises is not remembered."""
        result = self._results.pop(key, _ABSENT)
        if result is _ABSENT:
            result = compute()
        self._results[key] = result
        if len(self._results) > self._size:
            del self._results[next(iter(self._results))]
        return result
