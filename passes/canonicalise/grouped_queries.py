"""Attention whose keys and values are repeated for groups of query heads takes them as they are: ``enable_gqa``.

Models spell the repetition as ``expand`` and ``reshape`` (Hugging Face's ``repeat_kv``), as ``repeat_interleave``, or
as a plain ``expand`` of one head; some transpose heads and positions only after it. Attention that is told of the
groups needs neither copy: kernels read each head of keys once, and autograd keeps the small tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from passes.canonicalise.fx import argument, aten, calls, insert, shape

#: From the end, the dim that counts heads: (..., heads, length, width).
_HEADS = -3

#: What a tensor was before each slice along a dim was repeated, and how often; None if nothing repeats it.
_Repeated = tuple[fx.Node, int]


def group_queries(module: fx.GraphModule) -> None:
    """Rewrite every attention whose keys and values both are repeated, equally often, along their heads."""
    for node in calls(module.graph, aten.scaled_dot_product_attention.default):
        if argument(node, "enable_gqa") or len(shape(node)) < -_HEADS:
            continue
        query, key, value = (entry for entry in node.args[:3] if isinstance(entry, fx.Node))
        heads = len(shape(query)) + _HEADS
        if not shape(query)[heads] == shape(key)[heads] == shape(value)[heads]:
            continue
        sources = [_before_repeat(repeated, heads) for repeated in (key, value)]
        if all(source is not None and source[1] == sources[0][1] > 1 for source in sources):  # type: ignore[index]
            node.args = (query, *(source[0] for source in sources if source is not None), *node.args[3:])
            node.kwargs = {**node.kwargs, "enable_gqa": True}


def _before_repeat(node: fx.Node, dim: int) -> _Repeated | None:
    """What ``node`` repeats along ``dim``, slice by slice (0, 0, 1, 1, …)."""
    undo = _REPEATS.get(node.target)
    return undo(node, dim) if undo is not None else None


def _reshape(node: fx.Node, dim: int) -> _Repeated | None:
    """``reshape(expand([…, heads, 1, …] → […, heads, members, …]))``."""
    expanded = node.args[0]
    if not isinstance(expanded, fx.Node) or expanded.target is not aten.expand.default:
        return None
    source: Any = expanded.args[0]
    before, wide = shape(node)[:dim], shape(expanded)
    if len(wide) != len(shape(node)) + 1 or (*wide[:dim], *wide[dim + 2 :]) != (*before, *shape(node)[dim + 1 :]):
        return None
    heads, members = wide[dim : dim + 2]
    if shape(source) != (*before, heads, 1, *wide[dim + 2 :]):
        return None
    single = (*before, heads, *wide[dim + 2 :])
    inner = source.args[0] if source.target in (aten.unsqueeze.default, aten.reshape.default) else None
    if isinstance(inner, fx.Node) and shape(inner) == single:
        return inner, members
    return insert(node, aten.reshape.default, (source, list(single))), members


def _expand(node: fx.Node, dim: int) -> _Repeated | None:
    """One head for all."""
    source: Any = node.args[0]
    members = shape(node)[dim]
    alone = (*shape(node)[:dim], 1, *shape(node)[dim + 1 :])
    return (source, members) if shape(source) == alone else None


def _interleave(node: fx.Node, dim: int) -> _Repeated | None:
    along = argument(node, "dim")
    if along is None or along % len(shape(node)) != dim:
        return None
    return node.args[0], argument(node, "repeats")  # type: ignore[return-value]


def _transpose(node: fx.Node, dim: int) -> _Repeated | None:
    dims: Any = node.args[1:3]
    first, second = (entry % len(shape(node)) for entry in dims)
    return _under(node, node.args[0], {first: second, second: first}.get(dim, dim))


def _permute(node: fx.Node, dim: int) -> _Repeated | None:
    order: Any = node.args[1]
    return _under(node, node.args[0], order[dim] % len(shape(node)))


def _under(node: fx.Node, source: Any, dim: int) -> _Repeated | None:
    """The repetition that ``node``, a change of the order of dims, is applied to, with that change applied to it."""
    repeated = _before_repeat(source, dim)
    if repeated is None:
        return None
    assert callable(node.target)
    return insert(node, node.target, (repeated[0], *node.args[1:])), repeated[1]


_REPEATS: dict[Any, Callable[[fx.Node, int], _Repeated | None]] = {
    aten.reshape.default: _reshape,
    aten.expand.default: _expand,
    aten.repeat_interleave.self_int: _interleave,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
}
