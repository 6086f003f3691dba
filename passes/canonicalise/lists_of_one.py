"""Lists of one piece, which are no lists.

split(x, [n], d)[0]  →  x          chunk(x, 1, d)[0]  →  x          unbind(x, d)[0]  →  x.select(d, 0)

A dim of one piece may be cut: how long the piece is must not be said.
"""

from __future__ import annotations

import operator

from torch import fx

from passes.canonicalise.fx import argument, aten, calls, insert, replace

_SPLITS = (
    aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default, aten.tensor_split.sections,
    aten.unsafe_split.Tensor, aten.unsafe_chunk.default,
)  # fmt: skip


def unpack_lists_of_one(module: fx.GraphModule) -> None:
    """Replace the one piece of a ``split``, ``chunk`` or ``unbind`` by what it is of the whole."""
    for node in calls(module.graph, *_SPLITS, aten.unbind.int):
        if len(node.meta["val"]) != 1:
            continue
        for piece in [user for user in node.users if user.target is operator.getitem]:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            if node.target is aten.unbind.int:
                source = insert(piece, aten.select.int, (source, argument(node, "dim"), 0))
            replace(piece, source)
