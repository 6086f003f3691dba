"""Experts that compute all tokens, most of them times a score of zero: as experts that compute the tokens they have.

    scores = sigmoid(full_like(logits, -inf).scatter(1, ids, values))          # zero where a token was not routed to
    (x.repeat(E, 1) * scores.T.reshape(-1, 1)).view(E, tokens, H) @ weight …  .sum(0)       (Llama 4)
    (bmm(bmm(x.repeat(E, 1).view(E, tokens, H), weight) …) * scores.T[..., None]).sum(0)    (scores behind)

What is computed by [experts, tokens] gets a counterpart by [tokens, choices], operator by operator. The sum over
experts is that over choices if what other experts give is zero: their scores are, and nothing on the way adds to it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from passes.canonicalise.expert_rows import expert_linear
from passes.canonicalise.fx import argument, aten, calls, insert, is_random, replace, shape
from passes.canonicalise.row_operators import is_pointwise
from passes.canonicalise.sparse_scores import SparseScores, sparse_scores
from passes.torch_compat.operators import OpOverload


@dataclass(frozen=True)
class _Rows:
    """The counterpart of a value by [experts, tokens, …].

    Attributes:
        node: [tokens, choices, …], or [tokens, choices, 1, …] if ``deep``: choices that are rows of their own, whose
            sum over the dim of size 1 is a mixture's of one choice.
        keeps_zero: whether the value is zero for experts that a token was not routed to.
        deep: see ``node``.
        multiplied: whether it is a result of the experts' products.
    """

    node: fx.Node
    keeps_zero: bool
    deep: bool = False
    multiplied: bool = False


def route_dense_experts(module: fx.GraphModule) -> None:
    """Rewrite every sum over experts that compute all tokens."""
    for turned in calls(module.graph, aten.transpose.int):
        scores = sparse_scores(turned.args[0])
        if scores is not None and shape(turned) == (scores.num_experts, scores.num_tokens):
            _Routing(scores, turned).run()


class _Routing:
    """The counterparts of what is computed with one tensor of scores."""

    def __init__(self, scores: SparseScores, turned: fx.Node) -> None:
        self.sizes = scores.num_experts, scores.num_tokens
        self.scores = scores
        self.rows = {turned: _Rows(insert(turned, aten.gather.default, (scores.node, 1, scores.ids)), keeps_zero=True)}
        self.graph = turned.graph
        self.deep_ids: fx.Node | None = None

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op != "call_function" or node in self.rows or is_random(node):
                continue
            if self._sums_up(node):
                replace(node, self._sum(node, self.rows[node.args[0]]))  # type: ignore[index]
                continue
            rows = self._copies(node) or self._counterpart(node)
            if rows is not None:
                self.rows[node] = rows

    def _rest(self, node: Any) -> tuple[int, ...] | None:
        """The dims of a value behind experts and tokens, which may be one dim; None for another value."""
        size = shape(node)
        if size[:2] == self.sizes:
            return size[2:]
        return size[1:] if size and size[0] == self.sizes[0] * self.sizes[1] else None

    def _sums_up(self, node: fx.Node) -> bool:
        """Whether ``node`` is the sum over experts of what is zero where a token was not routed to."""
        if node.target is not aten.sum.dim_IntList or argument(node, "dtype") is not None:
            return False
        rows = self.rows.get(node.args[0])  # type: ignore[arg-type]
        if rows is None or not rows.keeps_zero or not rows.multiplied or len(self._rest(node.args[0]) or ()) != 1:
            return False
        is_apart = shape(node.args[0])[:2] == self.sizes  # type: ignore[arg-type]
        return is_apart and list(argument(node, "dim")) == [0] and not argument(node, "keepdim")

    def _sum(self, node: fx.Node, rows: _Rows) -> fx.Node:
        total = rows.node
        if rows.deep:
            ones = insert(node, aten.ones_like.default, (insert(node, aten.unsqueeze.default, (self._gathered, -1)),))
            total = insert(node, aten.mul.Tensor, (total, insert(node, aten.unsqueeze.default, (ones, -1))))
            total = insert(node, aten.sum.dim_IntList, (total, [2]))
        return insert(node, aten.sum.dim_IntList, (total, [1]))

    @property
    def _gathered(self) -> fx.Node:
        return next(iter(self.rows.values())).node

    def _copies(self, node: fx.Node) -> _Rows | None:
        """All tokens once for every expert."""
        args: Any = node.args
        experts, tokens = self.sizes
        source: Any = None
        if node.target is aten.repeat.default and list(args[1]) == [experts, *[1] * (len(shape(args[0])) - 1)]:
            source = args[0]
        elif node.target is aten.expand.default and args[0].target is aten.unsqueeze.default and args[0].args[1] == 0:
            source = args[0].args[0]
        if source is None or shape(source)[:1] != (tokens,) or self._rest(node) != shape(source)[1:]:
            return None
        return _Rows(insert(node, aten.unsqueeze.default, (source, 1)), keeps_zero=False)

    def _counterpart(self, node: fx.Node) -> _Rows | None:
        """The same call on counterparts; None if it has none."""
        if node.target is operator.getitem:
            pieces = self.rows.get(node.args[0])  # type: ignore[arg-type]
            return (
                None if pieces is None else self._like([pieces], insert(node, node.target, (pieces.node, node.args[1])))
            )
        operands = [self.rows[one] for one in node.all_input_nodes if one in self.rows]
        if not operands or not isinstance(node.target, OpOverload):
            return None
        if node.target in (aten.bmm.default, aten.matmul.default):
            return self._product(node)
        if node.target in _SAME_DIMS:
            return self._reshaped(node, operands[0])
        if node.target in _ALONG_LAST:
            return self._along_last(node, operands[0])
        return self._pointwise(node) if is_pointwise(str(node.target)) else None

    def _like(self, operands: Sequence[_Rows], node: fx.Node, *, keeps_zero: bool | None = None) -> _Rows:
        zero = all(one.keeps_zero for one in operands) if keeps_zero is None else keeps_zero
        return _Rows(
            node, zero, deep=any(one.deep for one in operands), multiplied=any(one.multiplied for one in operands)
        )

    def _reshaped(self, node: fx.Node, rows: _Rows) -> _Rows | None:
        rest = self._rest(node)
        if rest is None or self._rest(node.all_input_nodes[0]) is None:
            return None
        lead = shape(rows.node)[: 3 if rows.deep else 2]
        if shape(rows.node)[len(lead) :] == rest:
            return rows
        if (*shape(rows.node), 1) == (*lead, *rest):
            return self._like([rows], insert(node, aten.unsqueeze.default, (rows.node, -1)))
        return self._like([rows], insert(node, aten.reshape.default, (rows.node, [*lead, *rest])))

    def _along_last(self, node: fx.Node, rows: _Rows) -> _Rows | None:
        rank = len(shape(node.args[0]))  # type: ignore[arg-type]
        dim = argument(node, "dim") % rank
        if dim != rank - 1 or len(self._rest(node.args[0]) or ()) != 1:
            return None
        place = 2 if node.target is aten.split_with_sizes.default else 1
        args: list[Any] = [rows.node, *node.args[1:]]
        args[place] = len(shape(rows.node)) - 1
        return self._like([rows], insert(node, node.target, tuple(args)))  # type: ignore[arg-type]

    def _product(self, node: fx.Node) -> _Rows | None:
        """Tokens times a matrix of each expert."""
        source, weight = node.args
        rows = self.rows.get(source)  # type: ignore[arg-type]
        if rows is None or weight in self.rows or len(shape(node)) != 3 or shape(node)[:2] != self.sizes:
            return None
        if len(shape(weight)) != 3 or shape(weight)[0] != self.sizes[0]:  # type: ignore[arg-type]
            return None
        ids, values, deep = self.scores.ids, rows.node, rows.deep
        if rows.keeps_zero and not rows.multiplied:
            values, deep = insert(node, aten.unsqueeze.default, (values, 2)), True
        if deep:
            ids = self.deep_ids = self.deep_ids or insert(node, aten.unsqueeze.default, (ids, -1))
        turned = insert(node, aten.transpose.int, (weight, 1, 2))
        return _Rows(insert(node, expert_linear, (values, ids, turned)), rows.keeps_zero, deep=deep, multiplied=True)

    def _pointwise(self, node: fx.Node) -> _Rows | None:
        operands = {one: self._operand(node, one) for one in node.all_input_nodes}
        if any(rows is None for rows in operands.values()):
            return None
        known: dict[fx.Node, _Rows] = {one: rows for one, rows in operands.items() if rows is not None}
        if any(rows.deep for rows in known.values()):
            known = {one: rows if rows.deep else self._deep(node, rows) for one, rows in known.items()}
        counterparts = {one: rows.node for one, rows in known.items()}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: counterparts.get(one, one))
        made = insert(node, node.target, tuple(args), dict(kwargs))  # type: ignore[arg-type]
        return self._like(list(known.values()), made, keeps_zero=_keeps_zero(node, known))

    def _operand(self, node: fx.Node, operand: fx.Node) -> _Rows | None:
        """The counterpart of an operand: of one that knows neither experts nor tokens itself, of a bias its rows."""
        rows = self.rows.get(operand)
        if rows is not None:
            return rows if len(shape(operand)) == len(shape(node)) else None
        if len(shape(operand)) <= 1:
            return _Rows(operand, keeps_zero=False)
        if shape(node)[:2] == self.sizes and shape(operand)[:2] == (self.sizes[0], 1) and len(shape(operand)) == 3:
            is_apart = operand.target is aten.unsqueeze.default and operand.args[1] == 1
            table = operand.args[0] if is_apart else insert(node, aten.select.int, (operand, 1, 0))
            return _Rows(insert(node, aten.index.Tensor, (table, [self.scores.ids])), keeps_zero=False)
        return None

    def _deep(self, node: fx.Node, rows: _Rows) -> _Rows:
        if len(shape(rows.node)) <= 1:
            return rows
        apart = insert(node, aten.unsqueeze.default, (rows.node, 2))
        return _Rows(apart, rows.keeps_zero, deep=True, multiplied=rows.multiplied)


def _keeps_zero(node: fx.Node, operands: dict[fx.Node, _Rows]) -> bool:
    """Whether a pointwise operator gives zero where a token was not routed to."""
    zero = [rows.keeps_zero for rows in operands.values()]
    if node.target in _ONE_ZERO:
        return any(zero)
    if node.target is aten.div.Tensor:
        first: Any = node.args[0]
        return operands[first].keeps_zero if first in operands and len(operands) == 1 else False
    if node.target in _ALL_ZERO:
        constants = [one for one in node.args if isinstance(one, (int, float)) and one != 0]
        return all(zero) and not constants
    return all(zero) and node.target in _ZERO_OF_ZERO


#: Layouts that only add or merge dims.
_SAME_DIMS = (aten.reshape.default, aten.unsqueeze.default)
_ALONG_LAST = (aten.split_with_sizes.default, aten.slice.Tensor)
_ONE_ZERO = frozenset({aten.mul.Tensor, aten.mul.Scalar})
_ALL_ZERO = frozenset({aten.add.Tensor, aten.sub.Tensor})
_ZERO_OF_ZERO = frozenset({
    aten.silu.default, aten.gelu.default, aten.relu.default, aten.neg.default, aten.tanh.default, aten.to.dtype,
    aten.hardswish.default, aten.mish.default, aten.leaky_relu.default, aten.elu.default, aten.abs.default,
})  # fmt: skip
