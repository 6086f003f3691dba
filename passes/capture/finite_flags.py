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

from passes.capture.flag_logic import answer_from, aten_name

#: What these say of finite values.
_OF_FINITE = {"isfinite": True, "isnan": False, "isinf": False, "isposinf": False, "isneginf": False}
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_COUNTED = ("sum", "count_nonzero")


def answer_if_finite(flag: Any) -> bool | None:
    """What all entries of a mask are if all numbers are finite; None if that does not decide it."""
    return answer_from(flag, _known)


def _known(flag: fx.Node) -> bool | None:
    name, args = aten_name(flag), flag.args
    if name in _COMPARED and len(args) == 2:
        return _compared(_COMPARED[name], *args)
    return _OF_FINITE.get(name)


def _compared(compare: Callable[[Any, Any], bool], left: Any, right: Any) -> bool | None:
    """The answer of a comparison: of numbers with themselves or with infinity, or of how many entries are true."""
    if isinstance(left, fx.Node) and left is right and left.meta["val"].dtype.is_floating_point:
        return compare(0, 0)
    if not isinstance(left, fx.Node) or not isinstance(right, (int, float)):
        return None
    if math.isinf(right) and left.meta["val"].dtype.is_floating_point:
        return compare(0, right)
    is_empty = aten_name(left) in _COUNTED and answer_if_finite(left.args[0]) is False
    return compare(0, right) if is_empty else None
