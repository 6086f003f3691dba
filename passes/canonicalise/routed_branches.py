"""Sums of experts' branches whose scores are zero but for each token's choices: as experts of these choices alone.

    sum(where(chosen == e, scores, 0).sum(-1, keepdim=True) * expert[e](x) for e in range(E))
    sum(weights[..., e : e + 1] * expert[e](x) for e in range(E))       with weights = zeros.scatter(-1, chosen, scores)

becomes ``(layers of expert_linear(x, chosen, stacked weights) * scores).sum(choices)``: each token visits the experts
that it chose, not all. What others give is finite times zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx

from passes.canonicalise.expert_expressions import alike, operands_of, same_value
from passes.canonicalise.expert_masks import are_below, expert_mask
from passes.canonicalise.expert_rows import expert_linear
from passes.canonicalise.fx import argument, aten, insert, is_random, is_tensor, shape
from passes.canonicalise.row_operators import is_pointwise
from passes.canonicalise.sparse_scores import sparse_scores
from passes.torch_compat.operators import OpOverload

_CASTS = (aten.to.dtype, aten.alias.default, aten.detach.default)
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_NORMS = (aten.layer_norm.default, aten.rms_norm.default)


class Choices(NamedTuple):
    """Each token's choices of experts, and their scores: both [*tokens, choices]."""

    ids: fx.Node
    scores: fx.Node


def routed_sum(at: fx.Node, terms: Sequence[fx.Node], place: int) -> fx.Node | None:
    """The sum of products ``score * branch`` of experts 0, 1, … over each token's choices, inserted before ``at``.

    Args:
        place: of the score among the two factors.

    Returns:
        None if scores may be other than zero elsewhere, or the branches are not alike in a form that is known.
    """
    factors: list[Any] = [term.args for term in terms]
    choices = _choices(at, [pair[place] for pair in factors])
    branches = [pair[1 - place] for pair in factors]
    if choices is None or shape(branches[0])[:-1] != shape(choices.ids)[:-1]:
        return None
    rows = _ChosenRows(at, choices.ids).rows(branches)
    if rows is None:
        return None
    product = insert(at, aten.mul.Tensor, (rows, insert(at, aten.unsqueeze.default, (choices.scores, -1))))
    return insert(at, aten.sum.dim_IntList, (product, [len(shape(product)) - 2]))


def _choices(at: fx.Node, scores: Sequence[fx.Node]) -> Choices | None:
    """The choices of which each expert's scores [*tokens, 1] are its own."""
    inner = [node.args[0] if _adds_last(node) else node for node in scores]
    counted = [_of_comparison(node, number) for number, node in enumerate(inner)]
    first = counted[0]
    if first is None:
        return _of_columns(at, inner)
    are_same = all(each is not None and all(map(same_value, each, first)) for each in counted)
    return first if are_same and are_below(first.ids, len(scores)) else None


def _adds_last(node: Any) -> bool:
    if node.target is not aten.unsqueeze.default:
        return False
    return bool(node.args[1] in (-1, len(shape(node)) - 1))


def _of_comparison(node: Any, number: int) -> Choices | None:
    """``(scores * (ids == number)).sum(-1)``, or the same with ``where``."""
    if node.target is not aten.sum.dim_IntList or argument(node, "dtype") is not None:
        return None
    product: Any = node.args[0]
    if node.args[1] not in ([-1], [len(shape(product)) - 1]):
        return None
    if product.target in (aten.where.self, aten.where.ScalarOther) and _is_zero(product.args[2]):
        pairs = [product.args[:2]]
    elif product.target is aten.mul.Tensor:
        pairs = [product.args, product.args[::-1]]
    else:
        return None
    for equal, scores in pairs:
        while isinstance(equal, fx.Node) and equal.target in _CASTS:
            equal = equal.args[0]
        mask = expert_mask(equal) if isinstance(equal, fx.Node) else None
        is_own = mask is not None and mask.form == "equal" and mask.expert == number
        if mask is not None and is_own and isinstance(scores, fx.Node) and shape(scores) == shape(mask.source):
            return Choices(mask.source, scores) if shape(product) == shape(scores) else None
    return None


def _is_zero(other: Any) -> bool:
    return other.target in _ZEROS if isinstance(other, fx.Node) else other == 0


def _of_columns(at: fx.Node, columns: Sequence[Any]) -> Choices | None:
    """Column e, with or without its dim, of scores that are zero but for each token's choices."""
    whole: Any = columns[0].args[0] if columns[0].args else None
    if not isinstance(whole, fx.Node) or not is_tensor(whole) or shape(whole)[-1:] != (len(columns),):
        return None
    last = len(shape(whole)) - 1
    for number, column in enumerate(columns):
        is_entry = column.target is aten.select.int and column.args[1:] in ((last, number), (-1, number))
        is_slice = column.target is aten.slice.Tensor and argument(column, "dim") in (last, -1)
        if is_slice:
            is_slice = argument(column, "start") == number and shape(column)[-1] == 1
        if column.args[0] is not whole or not (is_entry or is_slice):
            return None
    sparse = sparse_scores(whole)
    return None if sparse is None else Choices(sparse.ids, insert(at, aten.gather.default, (whole, last, sparse.ids)))


class _ChosenRows:
    """Alike expressions, one for each expert, as one of each token's choices: [*tokens, choices, …]."""

    def __init__(self, at: fx.Node, ids: fx.Node) -> None:
        self._at, self._ids = at, ids
        self._built: dict[tuple[fx.Node, ...], fx.Node | None] = {}

    def rows(self, nodes: Sequence[fx.Node]) -> fx.Node | None:
        key = tuple(nodes)
        if key not in self._built:
            self._built[key] = self._computed(key)
        return self._built[key]

    def _computed(self, nodes: tuple[fx.Node, ...]) -> fx.Node | None:
        first = nodes[0]
        if all(same_value(first, node) for node in nodes):
            is_of_tokens = len(shape(first)) > 1 and shape(first)[:-1] == shape(self._ids)[:-1]
            return insert(self._at, aten.unsqueeze.default, (first, len(shape(first)) - 1)) if is_of_tokens else None
        if first.op != "call_function" or not isinstance(first.target, OpOverload) or is_random(first):
            return None
        if not is_tensor(first) or not all(alike(first, node) for node in nodes):
            return None
        if first.target is aten.linear.default:
            return self._linear(nodes)
        operands: dict[fx.Node, fx.Node] = {}
        for each in zip(*map(operands_of, nodes)):
            is_vector = len(shape(each[0])) < 2 and all(same_value(each[0], other) for other in each)
            built = each[0] if is_vector else self._vectors(each) or self.rows(each)
            if built is None or operands.setdefault(each[0], built) is not built:
                return None
        is_norm = first.target in _NORMS and len(argument(first, "normalized_shape")) == 1
        if not is_norm and not is_pointwise(str(first.target)):
            return None
        args, kwargs = fx.map_arg((first.args, first.kwargs), lambda one: operands.get(one, one))
        return insert(self._at, first.target, tuple(args), dict(kwargs))  # type: ignore[arg-type]

    def _linear(self, nodes: tuple[fx.Node, ...]) -> fx.Node | None:
        at, first = self._at, nodes[0]
        sources, weights, biases = ([argument(node, name) for node in nodes] for name in ("input", "weight", "bias"))
        source = self.rows(sources)
        if (
            source is None
            or not all(weight.op == "placeholder" for weight in weights)
            or len(set(weights)) < len(nodes)
        ):
            return None
        table = insert(at, aten.stack.default, (weights, 0))
        product = insert(at, expert_linear, (source, self._ids, table))
        if biases[0] is None:
            return product
        bias = biases[0] if all(one is biases[0] for one in biases) else self._vectors(biases)
        return None if bias is None else insert(at, aten.add.Tensor, (product, bias), like=first)

    def _vectors(self, nodes: Sequence[fx.Node]) -> fx.Node | None:
        """Each choice's own of vectors that are parameters."""
        if any(node.op != "placeholder" or len(shape(node)) != 1 for node in nodes):
            return None
        table = insert(self._at, aten.stack.default, (list(nodes), 0))
        return insert(self._at, aten.index.Tensor, (table, [self._ids]))
