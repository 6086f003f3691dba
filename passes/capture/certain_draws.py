"""Comparisons of random numbers that come out the same whatever is drawn: ``torch.rand(1) > 0`` of a dropout of 0.

``torch.rand`` draws from [0, 1). Its lowest value, which it draws once in 2^24 times in float32, is left out: a script
that writes ``rand() > p`` to drop with probability p means nothing else by p = 0.
"""

from __future__ import annotations

import torch
from torch import fx

_UNIFORM = ("aten.rand", "aten.rand_like")
_VIEWS = ("aten.view", "aten.reshape", "aten.squeeze", "aten.alias", "aten.detach")
_SAME_FLAGS = (*_VIEWS, "aten.to", "aten._to_copy")
#: Of fewer bits 0 is drawn often, and 1 may be what a number is rounded to.
_FINE = (torch.float32, torch.float64)
#: Comparison of x in (0, 1) with a number → what it is where the number is at most 0, and where it is at least 1.
_ANSWERS = {
    "aten.gt": (True, False), "aten.ge": (True, False), "aten.lt": (False, True), "aten.le": (False, True),
}  # fmt: skip
#: Operators that turn a flag round, with the number beside them, if there is one.
_NEGATIONS = (("aten.logical_not", ()), ("aten.bitwise_not", ()), ("aten.eq", (0,)))


def answer_of_draws(flag: fx.Node) -> bool | None:
    """What a comparison of uniform draws with a number is for all of them; None if draws decide it."""
    of = flag.args[0] if flag.args else None
    if not isinstance(of, fx.Node):
        return None
    name, numbers = _name(flag), list(flag.args[1:])
    if name in _SAME_FLAGS or (name, numbers) == ("aten.ne", [0]):
        return answer_of_draws(of)
    if (name, tuple(numbers)) in _NEGATIONS:
        answer = answer_of_draws(of)
        return None if answer is None else not answer
    if name not in _ANSWERS or not isinstance(numbers[0], (int, float)) or not _is_uniform(of):
        return None
    below, above = _ANSWERS[name]
    return below if numbers[0] <= 0 else above if numbers[0] >= 1 else None


def _is_uniform(node: fx.Node) -> bool:
    while _name(node) in _VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return _name(node) in _UNIFORM and node.meta["val"].dtype in _FINE


def _name(node: fx.Node) -> str:
    return str(node.target).rpartition(".")[0]
