"""Parts that are joined and cut apart again: such a part depends on nothing that it was joined with."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx


def joined_part(node: fx.Node) -> fx.Node | None:
    """The operand of ``cat`` that a node is again, but for its dtype: ``cat([a, b], d).split([|a|, |b|], d)[0]``."""
    if node.target is not operator.getitem:
        return None
    cut, place = node.args
    if not isinstance(cut, fx.Node) or str(cut.target) != "aten.split_with_sizes.default":
        return None
    arguments: Any = (*cut.args, 0)
    joined, sizes, dim = arguments[:3]
    if not isinstance(joined, fx.Node) or str(joined.target) != "aten.cat.default" or cut.kwargs or joined.kwargs:
        return None
    assert isinstance(place, int)
    operands: Any = joined.args[0]
    rank = joined.meta["val"].dim()
    joined_dim: Any = joined.args[1] if len(joined.args) > 1 else 0
    if joined_dim % rank != dim % rank:
        return None
    begin = sum(sizes[:place])
    before = 0
    for operand in operands:
        size = operand.meta["val"].shape
        if len(size) == rank and (before, size[dim]) == (begin, sizes[place]):
            return operand  # type: ignore[no-any-return]
        before += size[dim] if len(size) == rank else 0
    return None
