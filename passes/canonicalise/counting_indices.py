"""Integers that count up evenly, of any length: known by a formula, so that none of them is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from passes.canonicalise.fx import argument, aten, is_tensor, shape, value


@dataclass(frozen=True)
class Counting:
    """A tensor whose entry at (i, j, …) is ``(start + strides · (i, j, …)) // divisor``."""

    start: int
    strides: tuple[int, ...]
    divisor: int = 1


def counting(node: Any) -> Counting | None:
    """What ``node`` counts; None if it does not, or not in a way that is recognised here."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or not is_tensor(node):
        return None
    if value(node).is_floating_point() or value(node).is_complex():
        return None
    form = _FORMS.get(node.target)
    return form(node) if form is not None else None


def _arange(node: fx.Node) -> Counting | None:
    first, step = argument(node, "start", 0), argument(node, "step", 1)
    return Counting(first, (step,)) if isinstance(first, int) and isinstance(step, int) else None


def _same(node: fx.Node) -> Counting | None:
    return counting(node.args[0])


def _divided(node: fx.Node) -> Counting | None:
    source, divisor = counting(node.args[0]), node.args[1]
    rounds_down = node.target is aten.floor_divide.default or argument(node, "rounding_mode") == "floor"
    if source is None or not isinstance(divisor, int) or divisor < 1 or not rounds_down:
        return None
    return replace(source, divisor=source.divisor * divisor)


def _unsqueezed(node: fx.Node) -> Counting | None:
    source = counting(node.args[0])
    if source is None:
        return None
    strides, dim = list(source.strides), argument(node, "dim") % len(shape(node))
    return replace(source, strides=(*strides[:dim], 0, *strides[dim:]))


def _expanded(node: fx.Node) -> Counting | None:
    operand: Any = node.args[0]
    source = counting(operand)
    if source is None:
        return None
    sizes = shape(operand)
    strides = [0 if size == 1 else stride for size, stride in zip(sizes, source.strides)]
    return replace(source, strides=(*(0,) * (len(shape(node)) - len(sizes)), *strides))


def _flattened(node: fx.Node) -> Counting | None:
    """All dims merged into one."""
    operand: Any = node.args[0]
    source = counting(operand)
    if source is None or len(shape(node)) != 1:
        return None
    merged = replace(source, strides=(0,))
    inner = 1
    for size, stride in reversed(list(zip(shape(operand), source.strides))):
        joined = _merged(merged, stride, inner) if size > 1 else merged
        if joined is None:
            return None
        merged, inner = joined, inner * size
    return merged


def _merged(inner: Counting, stride: int, length: int) -> Counting | None:
    """A dim of ``stride`` in front of a flat one of ``length``, as one flat dim."""
    if length == 1:
        return replace(inner, strides=(stride,))
    if stride == length * inner.strides[0]:
        return inner
    # n copies of each number: i // n is what counts
    if inner.strides == (0,) and stride == 1 and inner.start == 0:
        return replace(inner, strides=(1,), divisor=inner.divisor * length)
    return None


_FORMS: dict[Any, Callable[[fx.Node], Counting | None]] = {
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _arange),
    **dict.fromkeys((aten.to.dtype, aten.alias.default, aten.clone.default, aten.contiguous.default), _same),
    **dict.fromkeys((aten.floor_divide.default, aten.div.Tensor_mode), _divided),
    aten.unsqueeze.default: _unsqueezed,
    aten.expand.default: _expanded,
    **dict.fromkeys((aten.reshape.default, aten.view.default), _flattened),
}
