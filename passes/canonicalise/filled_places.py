"""One value written wherever a mask is true, given as places: a choice by the mask itself.

``x[torch.where(mask)] = v`` asks how many entries of the mask are true, which weights may decide. The result does not
depend on it:

    x[where(m)] = v    ->  where(m, v, x)
    x[where(m)] += v   ->  where(m, x + v, x), of places that are written once each
"""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.canonicalise.expert_expressions import MaskPlaces, places_of
from passes.canonicalise.fx import argument, aten, calls, insert, replace, shape, value


def choose_by_mask(module: fx.GraphModule) -> None:
    """Replace writes of a value that is the same in all places."""
    for node in calls(module.graph, aten.index_put.default):
        base: Any = node.args[0]
        written: Any = node.args[2]
        places = places_of(node.args[1])  # type: ignore[arg-type]
        if places is None or not _covers(places, base) or not _is_one_value(written, base, places):
            continue
        if value(written).dtype != value(base).dtype:
            continue
        num_dims = len(places.dims)
        behind = len(shape(base)) - num_dims
        mask = insert(node, aten.reshape.default, (places.mask, [*shape(places.mask), *[1] * behind]))
        if len(shape(written)) > behind:  # a one for the places
            written = insert(node, aten.reshape.default, (written, list(shape(written)[1:])))
        if argument(node, "accumulate"):
            written = insert(node, aten.add.Tensor, (base, written))
        replace(node, insert(node, aten.where.self, (mask, written, base)))


def _covers(places: MaskPlaces, base: fx.Node) -> bool:
    """Whether the places are all that are true of a mask of the first dims, in their order."""
    num_dims = len(shape(places.mask))
    return places.dims == tuple(range(num_dims)) and shape(places.mask) == shape(base)[:num_dims]


def _is_one_value(written: fx.Node, base: fx.Node, places: MaskPlaces) -> bool:
    """Whether what is written has no dim for the places, or one of a single entry."""
    behind = len(shape(base)) - len(places.dims)
    dims = shape(written)
    return len(dims) <= behind or (len(dims) == behind + 1 and dims[0] == 1)
