"""Masks of the experts in a loop as one tensor of expert ids: every token's choices, and whether they count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx

from passes.canonicalise.fx import argument, aten, insert, shape, value

_CASTS = (aten.to.dtype, aten.alias.default, aten.detach.default)
_COMPARED_WITH_ZERO = (aten.gt.Scalar, aten.ne.Scalar)


class ExpertMask(NamedTuple):
    """What a mask says of one expert.

    Attributes:
        source: the tensor that all experts' masks are made of.
        form: "equal": ``ids == expert``; "any": whether any choice, along the last dim, is so; "one_hot": entry
            ``expert`` of one-hot rows that were brought to be ``[experts, …]``; "column": that along the last dim.
        expert: its number.
    """

    source: fx.Node
    form: str
    expert: int


class RoutedTokens(NamedTuple):
    """The expert of each choice of every token.

    Attributes:
        ids: [*tokens, K], -1 where ``valid`` is False.
        valid: flags [*tokens, K]; None if each choice has an expert.
        token_dims: the dims of a mask that are dims of tokens; what is left is its dim of choices.
        distinct: no token chooses an expert twice.
        single: each token has one choice, and ``ids`` no dim of choices.
    """

    ids: fx.Node
    valid: fx.Node | None
    token_dims: tuple[int, ...]
    distinct: bool
    single: bool = False

    @property
    def num_token_dims(self) -> int:
        return len(shape(self.ids)) - (0 if self.single else 1)

    @property
    def token_shape(self) -> tuple[int, ...]:
        return shape(self.ids)[: self.num_token_dims]


class _Choices(NamedTuple):
    """Ids in their own layout: ``dims[d]`` is the dim of a mask's dim ``d``."""

    ids: fx.Node
    counted: fx.Node | None
    dims: tuple[int, ...]


def expert_mask(mask: fx.Node) -> ExpertMask | None:
    """What a mask says of one expert; None if it is not known."""
    if mask.target is aten.any.dim and not argument(mask, "keepdim"):
        inner, dim = mask.args[:2]
        equal = _compared(inner)  # type: ignore[arg-type]
        is_last = dim in (-1, len(shape(inner)) - 1)  # type: ignore[arg-type]
        return equal._replace(form="any") if equal is not None and is_last else None
    return _compared(mask) or _entry_of_one_hot(mask)


def routed_tokens(
    at: fx.Node, masks: Sequence[ExpertMask], *, rank: int, token_dims: tuple[int, ...]
) -> RoutedTokens | None:
    """What the masks of all experts say together, inserted before ``at``; None if it is not known.

    Args:
        masks: those of experts that follow each other, of one source and form; the first one is 0 in the ids.
        rank: how many dims each of them has.
        token_dims: which of them are dims of tokens.
    """
    source, form, first = masks[0]
    if form == "any":
        rank += 1
    rest = [dim for dim in range(rank) if dim not in token_dims]
    choices: _Choices | None = _Choices(source, None, tuple(range(rank)))
    if form in ("one_hot", "column"):
        choices = _of_one_hot(at, source, is_column=form == "column")
    if choices is None or len(rest) > 1 or len(choices.dims) != rank:
        return None
    ids, valid = choices.ids, choices.counted
    distinct = not rest or (choices.dims[rest[0]] == rank - 1 and are_distinct(ids))
    if first:
        ids = insert(at, aten.sub.Scalar, (ids, first))
    if not are_below(ids, len(masks)):
        inside = insert(at, aten.bitwise_and.Tensor, (
            insert(at, aten.ge.Scalar, (ids, 0)), insert(at, aten.lt.Scalar, (ids, len(masks)))
        ))  # fmt: skip
        valid = inside if valid is None else insert(at, aten.bitwise_and.Tensor, (valid, inside))
    if valid is not None:
        ids = insert(at, aten.where.self, (valid, ids, insert(at, aten.full_like.default, (ids, -1))))
    order = [choices.dims[dim] for dim in (*token_dims, *rest)]
    parts = [None if part is None else laid_out_choices(at, part, order) for part in (ids, valid)]
    if source.target is aten.repeat_interleave.Tensor and valid is None:
        return RoutedTokens(ids, None, token_dims, distinct, single=True)
    if not rest:
        parts = [None if part is None else insert(at, aten.unsqueeze.default, (part, rank)) for part in parts]
    assert parts[0] is not None
    return RoutedTokens(parts[0], parts[1], token_dims, distinct)


def laid_out_choices(at: fx.Node, node: fx.Node, order: Sequence[int]) -> fx.Node:
    """``node`` with its first dims in another order."""
    rank = len(shape(node))
    order = [*order, *range(len(order), rank)]
    if order != list(range(rank)):
        swapped = [place for place, dim in enumerate(order) if place != dim]
        if len(swapped) == 2:
            node = insert(at, aten.transpose.int, (node, *swapped))
        else:
            node = insert(at, aten.permute.default, (node, order))
    return node


def _compared(mask: fx.Node) -> ExpertMask | None:
    """``ids == expert``."""
    if mask.target is not aten.eq.Scalar or value(mask.args[0]).is_floating_point():  # type: ignore[arg-type]
        return None
    ids, expert = mask.args
    return ExpertMask(ids, "equal", expert) if isinstance(expert, int) else None  # type: ignore[arg-type]


def _entry_of_one_hot(mask: fx.Node) -> ExpertMask | None:
    """An entry of a tensor of all experts' masks."""
    node: Any = mask
    while node.target in (*_CASTS, *_COMPARED_WITH_ZERO) or (
        node.target in (aten.reshape.default, aten.squeeze.dim) and shape(node) == shape(node.args[0])[1:]
    ):
        if node.target in _COMPARED_WITH_ZERO and node.args[1] != 0:
            return None
        node = node.args[0]
    if node.target is aten.select.int:
        form = {0: "one_hot", len(shape(node)): "column"}.get(node.args[1])
        return None if form is None else ExpertMask(node.args[0], form, node.args[2])
    if node.target is aten.index.Tensor and len(node.args[1]) == 1:
        number = _number(node.args[1][0])
        return None if number is None else ExpertMask(node.args[0], "one_hot", number)
    return None


def _number(index: Any) -> int | None:
    """The entry of an index that is one number written out."""
    if isinstance(index, fx.Node) and index.target is aten.full.default and value(index).numel() == 1:
        return int(index.args[1])  # type: ignore[arg-type]
    return None


def _of_one_hot(at: fx.Node, masks: fx.Node, *, is_column: bool) -> _Choices | None:
    """The ids that one-hot rows were made of, and which of them were not multiplied by zero."""
    rank = len(shape(masks))
    order = [rank - 1, *range(rank - 1)] if is_column else _order(masks)
    if order is None:
        return None
    node: Any = masks if is_column else masks.args[0]
    last = order[0]
    if last != len(shape(node)) - 1:
        return None
    layouts: list[tuple[int, ...]] = []
    weights: fx.Node | None = None
    while node.target is not aten.one_hot.default:
        if node.target in _CASTS:
            node = node.args[0]
        elif node.target is aten.reshape.default and shape(node)[-1] == shape(node.args[0])[-1]:
            layouts.append(shape(node)[:-1])
            node = node.args[0]
        elif node.target is aten.mul.Tensor and weights is None:
            weights = insert(at, aten.gt.Scalar, (insert(at, aten.sum.dim_IntList, (node, [-1])), 0))
            factor = next((each for each in node.args if _is_one_hot(each)), None)
            other = next((each for each in node.args if each is not factor), None)
            if factor is None or not isinstance(other, fx.Node) or "bool" not in str(value(other).dtype):
                return None
            if layouts:
                weights = insert(at, aten.reshape.default, (weights, list(layouts[0])))
            node = factor
        else:
            return None
    ids = node.args[0]
    if layouts:
        ids = insert(at, aten.reshape.default, (ids, list(layouts[0])))
    return _Choices(ids, weights, tuple(order[1:]))


def _is_one_hot(node: Any) -> bool:
    while isinstance(node, fx.Node) and node.target in (*_CASTS, aten.reshape.default):
        node = node.args[0]
    return isinstance(node, fx.Node) and node.target is aten.one_hot.default


def _order(node: fx.Node) -> list[int] | None:
    """The order of dims of a transposition."""
    if node.target is aten.permute.default:
        dims: Any = node.args[1]
        return [dim % len(dims) for dim in dims]
    if node.target is aten.transpose.int:
        rank = len(shape(node))
        order = list(range(rank))
        one, other = (int(dim) % rank for dim in node.args[1:])  # type: ignore[arg-type]
        order[one], order[other] = order[other], order[one]
        return order
    return None


def are_distinct(ids: fx.Node) -> bool:
    """Whether ids along the last dim come of ``topk`` along it, of any dims in front."""
    node: Any = ids
    while node.target in _CASTS or (
        node.target is aten.reshape.default and shape(node)[-1:] == shape(node.args[0])[-1:]
    ):
        node = node.args[0]
    if "getitem" not in str(node.target) or node.args[1] != 1 or node.args[0].target is not aten.topk.default:
        return False
    return argument(node.args[0], "dim") in (-1, len(shape(node)) - 1)


def are_below(ids: fx.Node, count: int) -> bool:
    """Whether ids are places along a dim of ``count`` entries."""
    node: Any = ids
    while node.target in (aten.reshape.default, aten.select.int, aten.slice.Tensor, *_CASTS):
        node = node.args[0]
    if node.target is aten.argmax.default:
        dim = argument(node, "dim")
        return dim is not None and shape(node.args[0])[dim] == count
    if node.target is aten.repeat_interleave.Tensor:
        return shape(node.args[0]) == (count,)
    if "getitem" not in str(node.target) or node.args[1] != 1:
        return False
    source = node.args[0]
    if source.target not in (aten.topk.default, aten.max.dim, aten.sort.default):
        return False
    return shape(source.args[0])[argument(source, "dim")] == count
