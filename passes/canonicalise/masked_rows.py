"""Rows that a mask picks, computed row by row, then put back or added up: all are computed, and the mask drops some.

How many rows a mask picks may depend on weights. With f any operators that treat rows alike:

    y[m] = f(x[m])     ->  where(m, f(x'), y)
    f(x[m]).sum(0)     ->  masked_fill(f(x'), ~m, 0).sum(dims of m)
    f(x[m]).mean()     ->  masked_fill(f(x'), ~m, 0).sum() / (m.sum() * entries of a row)
    f(x[m]).mean() if m.any() else 0  ->  the same with m.sum().clamp(min=1)

x' is x with zeros for the rows that are dropped, which may be no numbers (a target that is missing) or no indices (a
label of -100). A dropped row has the gradient zero, which an operator whose derivative is not finite at zero makes no
number of; x does not get it. Where there is one of these (``_FINITE`` has the others) on the way of a gradient, nothing
else that leads to f may have one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from passes.canonicalise.expert_expressions import MaskPlaces, places_of, same_value
from passes.canonicalise.fx import argument, aten, calls, insert, is_tensor, replace, shape, source_of, value
from passes.canonicalise.gradient_carriers import nodes_with_gradient
from passes.canonicalise.row_operators import rebuild
from passes.torch_compat.operators import OpOverload

_SUMS = (aten.sum.default, aten.sum.dim_IntList)
_MEANS = (aten.mean.default, aten.mean.dim)
#: Operators whose derivatives are finite at all finite numbers.
_FINITE = frozenset(
    {
        *("add", "sub", "mul", "neg", "abs", "sign", "relu", "gelu", "silu", "tanh", "sigmoid", "sin", "cos", "erf"),
        *("leaky_relu", "elu", "hardtanh", "hardswish", "hardsigmoid", "mish", "softplus", "log_sigmoid", "square"),
        *("where", "masked_fill", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "round", "floor", "ceil"),
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or", "bitwise_not", "bitwise_and"),
        *("bitwise_or", "isnan", "to", "alias", "detach", "clone", "unsqueeze", "squeeze", "reshape", "expand"),
        *("transpose", "select", "slice", "split_with_sizes", "unbind", "cat", "stack", "flip", "gather", "one_hot"),
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "softmax"),
        *("log_softmax", "logsumexp", "layer_norm", "rms_norm", "linear", "mm", "matmul", "sum", "mean", "cumsum"),
        *("embedding", "index", "amax", "amin", "argmax", "topk", "sort"),
    }
)


def compute_all_rows(
    module: fx.GraphModule, counts: Mapping[int, str], trainable: Collection[str], mean_of_none: float
) -> set[str]:
    """Replace what is computed of picked rows alone.

    Args:
        counts: made-up numbers of rows → where the model picks them.
        trainable: names of the placeholders that carry a gradient.
        mean_of_none: what the mean of no rows is: no number, or zero.

    Returns:
        names of the placeholders that rows go through (a layer's weights): where a model calls the layer only if there
        are rows, these have no gradient when there are none, and all rows give them zeros.
    """
    _compare_with_zero(module.graph, counts)
    _write_as_indices(module.graph, counts)
    _unite_masks(module.graph)
    nodes = list(calls(module.graph, aten.nonzero_static.default))
    of_layers = set[str]()
    for mask in dict.fromkeys(node.args[0] for node in nodes if argument(node, "size") in counts):
        assert isinstance(mask, fx.Node)
        rows = _AllRows(module.graph, mask, nodes_with_gradient(module.graph, trainable), mean_of_none)
        of_layers |= {source.name for source in map(source_of, rows.others()) if source.op == "placeholder"}
        rows.replace()
    return of_layers


def _compare_with_zero(graph: fx.Graph, counts: Mapping[int, str]) -> None:
    """Let the masks whose places are asked for be of flags: ``attention_mask.nonzero()`` is of numbers."""
    for node in calls(graph, aten.nonzero_static.default):
        mask: Any = node.args[0]
        if argument(node, "size") in counts and value(mask).dtype != torch.bool:
            node.replace_input_with(mask, insert(node, aten.ne.Scalar, (mask, 0)))


def _write_as_indices(graph: fx.Graph, counts: Mapping[int, str]) -> None:
    """``index_select``, ``index_copy`` and ``index_add`` of rows, as ``x[places]`` and ``x[places] = rows``."""
    for node in calls(graph, aten.index_select.default, aten.index_copy.default, aten.index_add.default):
        table, dim, index, *rows = node.args
        sizes = shape(index)  # type: ignore[arg-type]
        if dim != 0 or len(sizes) != 1 or sizes[0] not in counts:
            continue
        if node.target is aten.index_select.default:
            replace(node, insert(node, aten.index.Tensor, (table, [index])))
        elif argument(node, "alpha") in (None, 1):
            is_added = node.target is aten.index_add.default
            replace(node, insert(node, aten.index_put.default, (table, [index], *rows[:1], is_added)))


def _unite_masks(graph: fx.Graph) -> None:
    """Let what is computed twice be one mask."""
    masks: list[fx.Node] = []
    for node in calls(graph, aten.nonzero_static.default, aten.index_put.default):
        indices: Any = node.args[1] if node.target is aten.index_put.default else node.args[:1]
        for index in indices:
            if not isinstance(index, fx.Node) or value(index).dtype != torch.bool or index in masks:
                continue
            same = next((mask for mask in masks if same_value(mask, index)), None)
            if same is None:
                masks.append(index)
            else:
                node.replace_input_with(index, same)


def leave_out_sums(module: fx.GraphModule, left_out: Collection[int], mean_of_none: float) -> None:
    """Put what the sum or mean of no rows is in the place of those over some numbers of rows."""
    for node in calls(module.graph, *_SUMS, *_MEANS):
        source: Any = node.args[0]
        if shape(source) and shape(source)[0] in left_out and 0 in _reduced(node):
            number = 0 if node.target in _SUMS else mean_of_none
            replace(node, insert(node, aten.full.default, (list(shape(node)), number), {"dtype": value(node).dtype}))


class _AllRows:
    """What is computed of the rows that one mask picks.

    Args:
        mask: of the first dims of the tables that rows are picked from.
        carrying: the nodes that carry a gradient.
    """

    def __init__(self, graph: fx.Graph, mask: fx.Node, carrying: set[fx.Node], mean_of_none: float) -> None:
        self._graph = graph
        self._mask = mask
        self._carrying = carrying
        self._mean_of_none = mean_of_none
        self._num_dims = len(shape(mask))
        self._places = MaskPlaces(mask, tuple(range(self._num_dims)))
        #: Picked rows → the same of all rows.
        self._rows: dict[fx.Node, fx.Node] = {}

    def replace(self) -> None:
        if not all(map(_is_finite, self._differentiated())) and not all(map(_is_constant, self.others())):
            return
        for node in calls(self._graph):
            if self._is_pick(node):
                table: Any = node.args[0]
                dropped = insert(node, aten.bitwise_not.default, (self._spread(node, table),))
                self._rows[node] = insert(node, aten.masked_fill.Scalar, (table, dropped, 0))
            elif any(operand in self._rows for operand in node.all_input_nodes):
                result = self._chosen(node)
                if result is not None:
                    replace(node, result)
                elif (whole := rebuild(node, self._rows, self._num_dims)) is not None:
                    self._rows[node] = whole

    def _is_pick(self, node: fx.Node) -> bool:
        if node.target is not aten.index.Tensor or places_of(node.args[1]) != self._places:  # type: ignore[arg-type]
            return False
        return shape(node.args[0])[: self._num_dims] == shape(self._mask)  # type: ignore[arg-type]

    def _differentiated(self) -> list[fx.Node]:
        """The operators on picked rows that a gradient passes, and those that give operands of these."""
        operators = self._row_operators()
        needed: set[fx.Node] = set()
        for node in reversed(operators):
            if node in self._carrying or not needed.isdisjoint(node.users):
                needed.add(node)
        return [node for node in operators if node in needed]

    def _row_operators(self) -> list[fx.Node]:
        """What is computed of picked rows until they are put back or added up, in order."""
        operators: dict[fx.Node, None] = {}
        picks = {node for node in calls(self._graph) if self._is_pick(node)}
        for node in calls(self._graph):
            is_end = node in picks or self._is_write(node) or self._is_sum(node)
            if not is_end and any(operand in picks or operand in operators for operand in node.all_input_nodes):
                operators[node] = None
        return list(operators)

    def others(self) -> set[fx.Node]:
        """The operands of operators on rows that are no rows."""
        operators = self._row_operators()
        operands = {operand for node in operators for operand in node.all_input_nodes}
        return {operand for operand in operands.difference(operators) if not self._is_pick(operand)}

    def _is_write(self, node: fx.Node) -> bool:
        if node.target is not aten.index_put.default or places_of(node.args[1]) != self._places:  # type: ignore[arg-type]
            return False
        base, rows = node.args[0], node.args[2]
        num_features = len(shape(base)) - self._num_dims  # type: ignore[arg-type]
        return len(shape(rows)) == 1 + num_features and value(rows).dtype == value(node).dtype  # type: ignore[arg-type]

    def _is_sum(self, node: fx.Node) -> bool:
        return node.target in (*_SUMS, *_MEANS) and 0 in _reduced(node)

    def _chosen(self, node: fx.Node) -> fx.Node | None:
        """What a node that puts rows back or adds them up gives; None for others."""
        source: Any = node.args[0]
        if self._is_write(node) and source not in self._rows:
            rows: Any = self._rows[node.args[2]]  # type: ignore[index]
            if argument(node, "accumulate"):
                rows = insert(node, aten.add.Tensor, (source, rows))
            return insert(node, aten.where.self, (self._spread(node, source), rows, source))
        if self._is_sum(node):
            return self._sum(node)
        return None

    def _sum(self, node: fx.Node) -> fx.Node:
        source: Any = node.args[0]
        rows = self._rows[source]
        dropped = insert(node, aten.bitwise_not.default, (self._spread(node, rows),))
        rows_or_zeros = insert(node, aten.masked_fill.Scalar, (rows, dropped, 0))
        others = [dim for dim in _reduced(node) if dim]
        dims = [*range(self._num_dims), *(dim - 1 + self._num_dims for dim in others)]
        options = {} if argument(node, "dtype") is None else {"dtype": argument(node, "dtype")}
        total = insert(node, aten.sum.dim_IntList, (rows_or_zeros, dims), options)
        if node.target in _MEANS:
            number = insert(node, aten.sum.default, (self._mask,))
            if self._mean_of_none == 0:
                number = insert(node, aten.clamp_min.default, (number, 1))
            number = insert(node, aten.mul.Tensor, (number, math.prod(shape(source)[dim] for dim in others)))
            total = insert(node, aten.div.Tensor, (total, number))
        return insert(node, aten.reshape.default, (total, list(shape(node))))

    def _spread(self, node: fx.Node, table: fx.Node) -> fx.Node:
        """The mask with dims of one for what is behind the dims of ``table`` that it is of."""
        behind = [1] * (len(shape(table)) - self._num_dims)
        return insert(node, aten.reshape.default, (self._mask, [*shape(self._mask), *behind])) if behind else self._mask


def _reduced(node: fx.Node) -> list[int]:
    """The dims that a sum or mean takes away."""
    rank = len(shape(node.args[0]))  # type: ignore[arg-type]
    dims = argument(node, "dim") if node.target in (aten.sum.dim_IntList, aten.mean.dim) else None
    return [dim % rank for dim in dims] if dims else list(range(rank))


def _is_finite(node: fx.Node) -> bool:
    """Whether the derivative of an operator is finite wherever its operands are."""
    if not isinstance(node.target, OpOverload):
        return True  # one of several results
    name = str(node.target).split(".")[1]
    if name == "pow":
        return isinstance(node.args[1], int) and node.args[1] >= 1
    if name == "div":
        return not isinstance(node.args[1], fx.Node)
    return name in _FINITE


def _is_constant(node: fx.Node) -> bool:
    """Whether a node depends on nothing that the graph is given."""
    stack, seen = [node], {node}
    while stack:
        current = stack.pop()
        if current.op in ("placeholder", "get_attr") and is_tensor(current):
            return False
        stack += [operand for operand in current.all_input_nodes if operand not in seen]
        seen.update(current.all_input_nodes)
    return True
