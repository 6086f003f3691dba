"""Whole rows that are picked or added up by an index for each of their entries: as an index for each row.

x.gather(0, place[:, None].expand(-1, size))                   becomes x[place]
y.scatter_add(0, place[:, None].expand(-1, size), rows)        becomes y.index_add(0, place, rows)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.canonicalise.fx import argument, aten, calls, insert, replace, shape


def index_whole_rows(module: fx.GraphModule) -> None:
    """Rewrite what gathers from or adds to the first dim with an index that is the same along all others."""
    for node in calls(module.graph, aten.gather.default, aten.scatter_add.default):
        table, dim, index = node.args[:3]
        assert isinstance(table, fx.Node) and isinstance(index, fx.Node) and isinstance(dim, int)
        rank = len(shape(table))
        if rank < 2 or dim % rank != 0 or shape(index)[1:] != shape(table)[1:]:
            continue
        places = _places(node, index)
        if places is None:
            continue
        if node.target is aten.gather.default:
            replace(node, insert(node, aten.index.Tensor, (table, [places])))
        elif shape(argument(node, "src")) == shape(index):
            replace(node, insert(node, aten.index_add.default, (table, 0, places, argument(node, "src"))))


def _places(node: fx.Node, index: fx.Node) -> fx.Node | None:
    """The numbers [n] that ``index`` [n, …] repeats along its other dims; None if it does not."""
    rows = shape(index)[0]
    source: Any = index.args[0]
    is_repeated = index.target is aten.repeat.default and list(index.args[1])[:1] == [1]  # type: ignore[arg-type]
    if index.target is not aten.expand.default and not is_repeated:
        return None
    if shape(source) != (rows, *[1] * (len(shape(index)) - 1)):
        return None
    while source.target in (aten.unsqueeze.default, aten.reshape.default) and len(shape(source)) > 1:
        source = source.args[0]
    return source if shape(source) == (rows,) else insert(node, aten.reshape.default, (source, [rows]))  # type: ignore[no-any-return]
