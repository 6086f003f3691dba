"""Comparisons of numbers drawn from [0, 1) that come out the same whatever is drawn: ``torch.rand([]) < 0.0``.

Models ask for them where a layer is dropped with a probability that is zero (or one). Nothing is assumed of what is
drawn but its range, so no check is needed at run time. Of a single number the lowest, 0, which float32 gives once in
2^24 draws, is left out: a script that writes ``rand(1) > p`` to drop with probability p means nothing else by p = 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from passes.capture.flag_logic import answer_from, aten_name

_DRAWN = ("rand", "rand_like")
#: Operators whose results have the entries of their argument.
_SAME_ENTRIES = (
    "view", "reshape", "squeeze", "unsqueeze", "select", "alias", "detach", "clone", "to", "_to_copy",
)  # fmt: skip
#: Comparison → for which bounds it holds of every number that is drawn, and for which of none.
_DECIDED: dict[str, tuple[Callable[[float], bool], Callable[[float], bool]]] = {
    "lt": (lambda bound: bound >= 1, lambda bound: bound <= 0),
    "le": (lambda bound: bound >= 1, lambda bound: bound < 0),
    "gt": (lambda bound: bound < 0, lambda bound: bound >= 1),
    "ge": (lambda bound: bound <= 0, lambda bound: bound >= 1),
    "eq": (lambda bound: False, lambda bound: bound < 0 or bound >= 1),
    "ne": (lambda bound: bound < 0 or bound >= 1, lambda bound: False),
}

#: Comparison of a single number with 0 → what it is unless 0 is drawn.
_ABOVE_ZERO = {"gt": True, "le": False}


def answer_whatever_is_drawn(flag: fx.Node) -> bool | None:
    """What all entries of a mask are for all numbers that can be drawn; None if that does not decide it."""
    return answer_from(flag, _known)


def _known(flag: fx.Node) -> bool | None:
    name, args = aten_name(flag), flag.args
    if name not in _DECIDED or len(args) != 2 or not isinstance(args[1], (int, float)):
        return None
    if not isinstance(args[0], fx.Node) or not is_drawn(args[0]):
        return None
    return compared(name, args[1], is_single=args[0].meta["val"].numel() == 1)


def compared(name: str, bound: float, *, is_single: bool) -> bool | None:
    """What the comparison ``name`` of what is drawn from [0, 1) with ``bound`` is for all numbers; None if for some.

    Args:
        is_single: of one number, of which zero is left out.
    """
    if bound == 0 and is_single and name in _ABOVE_ZERO:
        return _ABOVE_ZERO[name]
    always, never = _DECIDED[name]
    if always(bound):
        return True
    return False if never(bound) else None


def is_drawn(node: fx.Node) -> bool:
    """Whether all entries, one at least, are drawn from [0, 1), and none was rounded to 1."""
    value = node.meta["val"]
    if value.dtype not in (torch.float32, torch.float64) or not all(
        isinstance(size, int) and size for size in value.shape
    ):
        return False
    name = aten_name(node)
    if name in _SAME_ENTRIES:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        is_rounded = value.dtype.itemsize < source.meta["val"].dtype.itemsize
        return not is_rounded and is_drawn(source)
    return name in _DRAWN
