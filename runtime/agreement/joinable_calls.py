"""Calls that a rank may make alone, as scripts do that save on the main process: the others join in.

A rank that comes to a call hears from the others what they call. If one of them makes a call that can be joined, it
makes that one too, drops what it returns, and goes on to its own.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

#: The ranks of a module, and its number among their modules: the same on each of them.
Number = tuple[tuple[int, ...], int]


@dataclass(frozen=True)
class JoinableCall:
    """A call by the module's number, its name and its arguments, which the ranks that join in pass too."""

    module: Number
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Joining(Protocol):
    """A module that makes calls by name."""

    def join(self, name: str, arguments: Mapping[str, Any]) -> None: ...


_counts: defaultdict[tuple[int, ...], itertools.count[int]] = defaultdict(itertools.count)
_modules: weakref.WeakValueDictionary[Number, Joining] = weakref.WeakValueDictionary()


def next_number(ranks: tuple[int, ...]) -> Number:
    """The number of one more module of ``ranks``, which all of them must make."""
    return ranks, next(_counts[ranks])


def register(number: Number, module: Joining) -> None:
    """Let calls of ``module`` be joined, as long as it is there."""
    _modules[number] = module


def join(call: JoinableCall) -> None:
    """Make a call that another rank makes.

    Raises:
        ValueError: if this rank has no such module any more.
    """
    module = _modules.get(call.module)
    if module is None:
        raise ValueError(
            f"a rank calls {call.name} of a module that this rank has dropped: every rank must make the same calls"
        )
    module.join(call.name, call.arguments)


def joined(calls: Sequence[JoinableCall | None]) -> JoinableCall | None:
    """The call that all ranks make now, given the joinable ones of each; None if each makes its own."""
    if len({None if call is None else (call.module, call.name) for call in calls}) == 1:
        return None
    return next(call for call in calls if call is not None)
