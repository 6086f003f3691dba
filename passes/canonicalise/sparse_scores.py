"""Scores of all experts that are zero but for those that a token chose."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from passes.canonicalise.fx import argument, aten, is_tensor, shape


@dataclass(frozen=True)
class SparseScores:
    """Scores [*tokens, experts] that are zero for all experts but those in ``ids``.

    Attributes:
        ids: [*tokens, choices], each another expert.
    """

    node: fx.Node
    ids: fx.Node

    @property
    def num_tokens(self) -> int:
        return math.prod(shape(self.node)[:-1])

    @property
    def num_experts(self) -> int:
        return shape(self.node)[-1]


def sparse_scores(node: Any) -> SparseScores | None:
    """What ``node`` is, if it is what the best choices were scattered into; None for other values."""
    if not isinstance(node, fx.Node) or not is_tensor(node) or len(shape(node)) < 2:
        return None
    rank = len(shape(node))
    source: Any = node
    is_squashed = False
    while isinstance(source, fx.Node) and source.target in (aten.to.dtype, *_SQUASHES):
        if source.target in _SQUASHES:
            if source.target is aten.softmax.int and argument(source, "dim") % rank != rank - 1:
                return None
            is_squashed = True
        source = source.args[0]
    if (
        not isinstance(source, fx.Node)
        or source.target is not aten.scatter.src
        or argument(source, "dim") % rank != rank - 1
    ):
        return None
    base, ids = source.args[0], source.args[2]
    if _fill(base) != (float("-inf") if is_squashed else 0.0) or not _are_best(ids):
        return None
    return SparseScores(node, ids)  # type: ignore[arg-type]


def _fill(node: Any) -> float | None:
    """The number that a tensor is full of."""
    if node.target in _FULL:
        value = argument(node, "fill_value")
        return float(value) if isinstance(value, (int, float)) else None
    return 0.0 if node.target in _ZEROS else None


def _are_best(ids: Any) -> bool:
    """Whether these are the places of the best choices of each row, of which no two are the same."""
    if not isinstance(ids, fx.Node) or ids.target is not operator.getitem or ids.args[1] != 1:
        return False
    best: Any = ids.args[0]
    return best.target is aten.topk.default and argument(best, "dim") % len(shape(ids)) == len(shape(ids)) - 1


#: Functions that are zero at minus infinity, as is their derivative.
_SQUASHES = (aten.sigmoid.default, aten.softmax.int)
_FULL = (aten.full_like.default, aten.full.default, aten.new_full.default)
_ZEROS = (aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default)
