"""All pieces of a tensor put together again, as the tensor itself: features that are split by image and concatenated.

cat(split(x, sizes, d), d)  →  x          stack(unbind(x, d), d)  →  x          cat(unbind(x, 0), 0)  →  x.flatten(0, 1)

As pieces they ask for all samples at once; whole they keep them apart.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from passes.canonicalise.fx import argument, aten, calls, insert, replace, shape


def unite_pieces(module: fx.GraphModule) -> None:
    """Replace ``cat`` and ``stack`` of all outputs of one ``split_with_sizes`` or ``unbind``, in order."""
    for node in calls(module.graph, aten.cat.default, aten.stack.default):
        source = _taken_apart(node)
        if source is not None:
            whole = source if shape(source) == shape(node) else _flattened(node, source)
            replace(node, whole)


def _taken_apart(node: fx.Node) -> fx.Node | None:
    """The tensor whose pieces ``node`` puts together in their order along their dim; None if it does something else."""
    pieces: Any = node.args[0]
    first = pieces[0] if isinstance(pieces, (list, tuple)) and pieces else None
    if not isinstance(first, fx.Node) or first.target is not operator.getitem:
        return None
    apart: Any = first.args[0]
    if apart.target not in (aten.split_with_sizes.default, aten.unbind.int):
        return None
    in_order = all(piece.target is operator.getitem and piece.args == (apart, i) for i, piece in enumerate(pieces))
    if not in_order or len(pieces) != len(apart.meta["val"]):
        return None
    source: Any = apart.args[0]
    dim = argument(node, "dim") % (len(shape(node)))
    if dim != argument(apart, "dim") % len(shape(source)):
        return None
    joined = (node.target is aten.stack.default) == (apart.target is aten.unbind.int)
    return source if joined or (apart.target is aten.unbind.int and dim == 0) else None


def _flattened(node: fx.Node, source: fx.Node) -> fx.Node:
    return insert(node, aten.reshape.default, (source, list(shape(node))))
