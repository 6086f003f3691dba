"""What a flag is, from what is known of the flags and numbers that it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

#: Comparisons of a flag with False, by which flag they are true of.
_COMPARED_WITH_NOTHING = {"ne": True, "eq": False}
_NOT = ("logical_not", "bitwise_not")
_AND, _OR = ("logical_and", "bitwise_and", "__and__", "mul"), ("logical_or", "bitwise_or", "__or__", "add")
#: Operators whose entries are all true if all that they take are, and false if all are.
_ALIKE = ("all", "any", "view", "reshape", "alias", "detach", "clone", "to", "_to_copy", "squeeze", "unsqueeze")

#: What all entries of a flag are; None where it is not known.
Known = Callable[[fx.Node], bool | None]


def answer_from(flag: Any, known: Known) -> bool | None:
    """What all entries of a mask are, by what is ``known`` of masks; None if that does not decide it."""
    if not isinstance(flag, fx.Node):
        return None
    answer, name, args = known(flag), aten_name(flag), flag.args
    if answer is not None:
        return answer
    if name in _COMPARED_WITH_NOTHING and args[1:] == (0,) and _is_mask(args[0]):  # as ``bool(flag)`` asks
        of = answer_from(args[0], known)
        return None if of is None else of == _COMPARED_WITH_NOTHING[name]
    if name in _NOT:
        of = answer_from(args[0], known)
        return None if of is None else not of
    if name in _AND or name in _OR:
        both = [answer_from(arg, known) for arg in args[:2]]
        decisive = name in _OR
        return decisive if decisive in both else (None if None in both else not decisive)
    return answer_from(args[0], known) if name in _ALIKE else None


def _is_mask(argument: Any) -> bool:
    return isinstance(argument, fx.Node) and argument.meta["val"].dtype == torch.bool


def aten_name(node: fx.Node) -> str:
    """``sum`` for ``aten.sum`` and each of its overloads; empty for what is not of ATen."""
    parts = str(node.target).split(".")
    return parts[1] if parts[0] == "aten" and len(parts) > 1 else ""
