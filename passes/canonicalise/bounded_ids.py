"""Integers that are places along a dim, told from the operators that give them: they are below its size."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from passes.torch_compat.operators import OpOverload, schema

#: Operators that give places along a dim, by which of their results these are; None: there is only one.
_PLACES = {"aten.topk": 1, "aten.sort": 1, "aten.max": 1, "aten.min": 1, "aten.argmax": None, "aten.argsort": None}
#: Operators whose results have no entries but those of their first argument.
_SAME_ENTRIES = frozenset(
    f"aten.{name}"
    for name in (
        "view", "reshape", "flatten", "squeeze", "unsqueeze", "select", "slice", "transpose", "permute", "expand", "t",
        "to", "_to_copy", "alias", "detach", "contiguous", "clone", "index",
    )
)  # fmt: skip


def bound_of_ids(node: Any) -> int | None:
    """A number that all entries of what a node gives are below, none of them negative; None if none is known."""
    while isinstance(node, fx.Node) and (_name(node) in _SAME_ENTRIES or _is_sorted(node)):
        node = node.args[0].args[0] if _is_sorted(node) else node.args[0]  # type: ignore[union-attr]
    place: Any = None
    if isinstance(node, fx.Node) and node.target is operator.getitem:
        node, place = node.args[:2]
    if not isinstance(node, fx.Node) or _name(node) not in _PLACES or _PLACES[_name(node)] != place:
        return None
    dim = _dim(node)
    return None if dim is None else int(node.args[0].meta["val"].shape[dim])  # type: ignore[union-attr]


def _is_sorted(node: fx.Node) -> bool:
    """Whether a node gives the entries of a tensor in order."""
    if node.target is not operator.getitem or node.args[1] != 0:
        return False
    return isinstance(node.args[0], fx.Node) and _name(node.args[0]) == "aten.sort"


def _dim(node: fx.Node) -> int | None:
    """The dim along which an operator works; None for all dims."""
    assert isinstance(node.target, OpOverload)
    for place, entry in enumerate(schema(node.target).arguments):
        if entry.name == "dim":
            given = node.args[place] if place < len(node.args) else node.kwargs.get("dim", entry.default_value)
            return given if isinstance(given, int) else None
    return None


def _name(node: fx.Node) -> str:
    return str(node.target).rpartition(".")[0]
