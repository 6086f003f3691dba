"""Flags that tell whether numbers are finite: ``isfinite(x).all()``, ``x.isnan().any()``, ``x.abs().max() == inf``.

Models ask to clamp what overflowed (detectors, after each layer in training). Where weights decide, no answer can be a
constant of the program: it is traced as for finite values, and checks at every call that they are.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from torch import fx

#: What these say of finite values.
_OF_FINITE = {"isfinite": True, "isnan": False, "isinf": False, "isposinf": False, "isneginf": False}
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_NOT = ("logical_not", "bitwise_not")
_AND, _OR = ("logical_and", "bitwise_and", "__and__", "mul"), ("logical_or", "bitwise_or", "__or__", "add")
#: Operators whose entries are all true if all that they take are, and false if all are.
_ALIKE = ("all", "any", "view", "reshape", "alias", "detach", "clone", "to", "_to_copy", "squeeze", "unsqueeze")
_COUNTED = ("sum", "count_nonzero")


def answer_if_finite(flag: fx.Node) -> bool | None:
    """What all entries of a mask are if all numbers are finite; None if that does not decide it."""
    name, args = _name(flag), flag.args
    if name in _OF_FINITE:
        return _OF_FINITE[name]
    if name in _COMPARED and len(args) == 2:
        return _compared(_COMPARED[name], *args)
    if name in _NOT:
        of = _answer(args[0])
        return None if of is None else not of
    if name in _AND or name in _OR:
        both = [_answer(arg) for arg in args[:2]]
        decisive = name in _OR
        return decisive if decisive in both else (None if None in both else not decisive)
    return _answer(args[0]) if name in _ALIKE else None


def _compared(compare: Callable[[Any, Any], bool], left: Any, right: Any) -> bool | None:
    """The answer of a comparison: of numbers with themselves or with infinity, or of how many entries are true."""
    if isinstance(left, fx.Node) and left is right and left.meta["val"].dtype.is_floating_point:
        return compare(0, 0)
    if not isinstance(left, fx.Node) or not isinstance(right, (int, float)):
        return None
    if math.isinf(right) and left.meta["val"].dtype.is_floating_point:
        return compare(0, right)
    is_empty = _name(left) in _COUNTED and _answer(left.args[0]) is False
    return compare(0, right) if is_empty else None


def _answer(argument: Any) -> bool | None:
    return answer_if_finite(argument) if isinstance(argument, fx.Node) else None


def _name(node: fx.Node) -> str:
    parts = str(node.target).split(".")
    return parts[1] if parts[0] == "aten" and len(parts) > 1 else ""
