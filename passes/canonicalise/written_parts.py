"""A tensor that is written part by part until nothing of it is left, as those parts side by side.

k = x.new_empty(…, 192); k[..., :128] = a; k[..., 128:] = b          →          cat([a, b], -1)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.canonicalise.fx import argument, aten, calls, insert, replace, shape, value


def join_written_parts(module: fx.GraphModule) -> None:
    """Replace rows of ``slice_scatter`` that write all of a tensor along one dim by ``cat``."""
    for last in calls(module.graph, aten.slice_scatter.default):
        if not _is_written_over(last):
            parts = _parts(last)
            if parts is not None:
                replace(last, insert(last, aten.cat.default, (parts, _dim(last))))


def _is_written_over(node: fx.Node) -> bool:
    """Whether the only use of ``node`` is to write another part of the same dim."""
    users = list(node.users)
    return len(users) == 1 and users[0].target is node.target and users[0].args[0] is node and (
        _dim(users[0]) == _dim(node)
    )  # fmt: skip


def _parts(last: fx.Node) -> list[fx.Node] | None:
    """What was written, in order along the dim; None if the tensor shows through or is written twice."""
    dim, size = _dim(last), shape(last)[_dim(last)]
    written: dict[int, tuple[int, fx.Node]] = {}
    node: Any = last
    while isinstance(node, fx.Node) and node.target is aten.slice_scatter.default and _dim(node) == dim:
        part: Any = node.args[1]
        start, end = _bounds(node, size)
        if argument(node, "step") != 1 or start in written or value(part).dtype != value(last).dtype:
            return None
        written[start] = (end, part)
        node = node.args[0]
    reached = 0
    parts = []
    for start, (end, part) in sorted(written.items(), key=lambda entry: entry[0]):
        if start != reached or end <= start:
            return None
        reached = end
        parts.append(part)
    return parts if reached == size else None


def _dim(node: fx.Node) -> int:
    return int(argument(node, "dim")) % len(shape(node))


def _bounds(node: fx.Node, size: int) -> tuple[int, int]:
    """First entry and the one behind the last, as slices count."""
    return slice(argument(node, "start"), argument(node, "end")).indices(size)[:2]
