"""Rows that stand several times in a row, as a dim of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes.canonicalise.counting_indices import counting
from passes.canonicalise.fx import argument, aten, calls, insert, replace, shape

#: Most entries of an index that is computed to see what it is.
_MOST = 1 << 24


def repeated(node: fx.Node, source: fx.Node, count: int) -> fx.Node:
    """Each row of ``source`` ``count`` times in a row, as a view: inserted before ``node``."""
    rows, *rest = shape(source)
    apart = insert(node, aten.unsqueeze.default, (source, 1))
    wide = insert(node, aten.expand.default, (apart, [rows, count, *rest]))
    return insert(node, aten.reshape.default, (wide, [rows * count, *rest]))


def expand_repeated_rows(module: fx.GraphModule) -> None:
    """``repeat_interleave`` along the first dim, and rows picked by ``0, 0, 1, 1, …``, as views."""
    for node in calls(module.graph, aten.repeat_interleave.self_int, aten.index.Tensor):
        source: Any = node.args[0]
        count: int | None = None
        if node.target is aten.index.Tensor:
            indices: Any = node.args[1]
            if len(indices) == 1 and len(shape(indices[0])) == 1:
                count = repetitions(indices[0], shape(node)[0])
                count = count if count and shape(source)[0] * count == shape(node)[0] else None
        elif argument(node, "dim") is not None and argument(node, "dim") % len(shape(source)) == 0:
            count = argument(node, "repeats")
        if count == 1:
            replace(node, source)
        elif count is not None:
            replace(node, repeated(node, source, count))


def repetitions(index: Any, length: int) -> int | None:
    """``count`` if ``index`` is the constant ``0, …, 0, 1, …, 1, 2, …`` with each number ``count`` times."""
    if not isinstance(index, fx.Node) or shape(index) != (length,):
        return None
    form = counting(index)
    if form is not None:
        return form.divisor if (form.start, form.strides) == (0, (1,)) else None
    if not 0 < length <= _MOST:
        return None
    values = _constant(index)
    if values is None or values.is_floating_point():
        return None
    count = int((values == 0).sum())
    return count if count and torch.equal(values, torch.arange(length) // count) else None


def _constant(node: fx.Node) -> torch.Tensor | None:
    """The value of a node that depends on no tensor; None for one that does."""
    needed, waiting = {node}, [node]
    while waiting:
        each = waiting.pop()
        operands = each.all_input_nodes
        if each.op != "call_function" or not isinstance(each.meta.get("val"), torch.Tensor):
            return None
        if not operands and each.target not in _SOURCES:
            return None
        waiting += [operand for operand in operands if operand not in needed]
        needed.update(operands)
    values: dict[fx.Node, torch.Tensor] = {}
    for each in node.graph.nodes:
        if each in needed:
            args, kwargs = fx.map_arg((each.args, each.kwargs), values.__getitem__)
            kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory", "layout")}
            values[each] = each.target(*args, **kwargs)
    return values[node]


_SOURCES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
