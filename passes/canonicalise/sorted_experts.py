"""Rows that are sorted by expert, multiplied group by group, and put back: as rows that stay where they are.

    order = sort(ids); y = grouped_mm(x[order // k], weight, cumsum(histc(ids))); y[inverse of order]

becomes ``expert_linear(x, ids, weight)``; sorted rows that are cut by how many each expert has are there already as
such (``expert_loops``). Sorting mixes the samples of a batch; what it is for does not. Every value in sorted order gets
a counterpart in the order of the ids, operator by operator; where rows are put back (or added up, or counted), the
counterpart takes over. What has none keeps the sorted rows.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from passes.canonicalise.expert_expressions import same_value
from passes.canonicalise.expert_masks import are_distinct
from passes.canonicalise.expert_rows import expert_linear
from passes.canonicalise.fx import argument, aten, calls, insert, is_tensor, replace, shape
from passes.canonicalise.repeated_rows import repeated, repetitions
from passes.canonicalise.row_operators import rebuild
from passes.torch_compat import grouped_products as _operator  # noqa: F401

_SORTS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
_FILLED = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
#: Operators that count, whatever the order.
_COUNTS = (aten.histc.default,)


def grouped_products() -> tuple[Any, ...]:
    """Operators ``(rows, weight[experts, in, out], ends)`` that multiply groups of rows by a matrix each."""
    library = getattr(torch.ops, "transformers", None)
    packet = getattr(library, "grouped_mm_fallback", None)
    ours = torch.ops.meshwright.grouped_products.default
    return (aten._grouped_mm.default, ours, *((packet.default,) if packet is not None else ()))


def unsort_experts(module: fx.GraphModule) -> None:
    """Replace what is computed on rows sorted by expert by the same on rows in their own order."""
    products = grouped_products()
    if not any(True for _ in calls(module.graph, *products, aten.repeat_interleave.Tensor)):
        return
    for sort in calls(module.graph, *_SORTS):
        if len(shape(sort.all_input_nodes[0])) == 1 and not argument(sort, "descending"):
            _Unsorting(sort, products).run()


class _Unsorting:
    """The counterparts of what one sort puts in order.

    Attributes:
        in_order: value in sorted order → the same in the order of the ids.
        orders: the places of sorted rows, divided by how many rows one entry of a table stands for → that number.
    """

    def __init__(self, sort: fx.Node, products: tuple[Any, ...]) -> None:
        self.ids = sort.all_input_nodes[0]
        self.products = products
        self.in_order: dict[fx.Node, fx.Node] = {}
        self.orders: dict[fx.Node, int] = {}
        self.inverses: set[fx.Node] = set()
        self.num_rows = shape(self.ids)[0]
        self.graph = sort.graph
        if is_tensor(sort):
            self.orders[sort] = 1
        for user in sort.users:
            if user.target is operator.getitem and user.args[1] == 0:
                self.in_order[user] = self.ids
            elif user.target is operator.getitem:
                self.orders[user] = 1

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op != "call_function" or node in self.in_order or node in self.orders:
                continue
            if any(operand in self.orders or operand in self.inverses for operand in node.all_input_nodes):
                self._by_order(node)
            elif any(operand in self.in_order for operand in node.all_input_nodes):
                self._of_sorted(node)
            elif node.target is aten.repeat_interleave.Tensor and self._are_counts(node.args[0]):
                self.in_order[node] = self.ids

    def _by_order(self, node: fx.Node) -> None:
        """A use of the places of sorted rows."""
        order = next((operand for operand in node.all_input_nodes if operand in self.orders), None)
        count = self.orders.get(order, 0) if order is not None else 0
        target = node.target
        args: Any = node.args
        if target is aten.index.Tensor and len(args[1]) == 1:
            table, (place,) = args
            if place in self.inverses and table in self.in_order:
                replace(node, self.in_order[table])
            elif place is order and shape(table)[0] * count == self.num_rows:
                self.in_order[node] = table if count == 1 else repeated(node, table, count)
        elif self._divides(node) and isinstance(args[1], int):
            self.orders[node] = count * args[1]
        elif count == 1 and target in _SORTS:
            self.inverses.update([node] if is_tensor(node) else [
                user for user in node.users if user.target is operator.getitem and user.args[1] == 1
            ])  # fmt: skip
        elif count == 1 and self._puts_back(node):
            written = args[2] if target is aten.index_put.default else args[3]
            if written in self.in_order:
                replace(node, self.in_order[written])
            elif repetitions(written, self.num_rows) == 1:
                self.inverses.add(node)
        elif target is aten.index_add.default and args[2] is order and args[3] in self.in_order:
            self._add_up(node, count)

    def _divides(self, node: fx.Node) -> bool:
        """Whether ``node`` is an integer division."""
        rounds = node.target is aten.div.Tensor_mode and argument(node, "rounding_mode") is not None
        return rounds or node.target is aten.floor_divide.default

    def _puts_back(self, node: fx.Node) -> bool:
        """Whether ``node`` writes every row of a tensor, at the places of the sorted rows."""
        args: Any = node.args
        if node.target is aten.index_put.default:
            return len(args[1]) == 1 and not argument(node, "accumulate") and shape(node)[0] == self.num_rows
        if node.target in (aten.index_copy.default, aten.scatter.src):
            return bool(args[1] == 0 and shape(node)[0] == self.num_rows and shape(args[2]) == (self.num_rows,))
        return False

    def _add_up(self, node: fx.Node, count: int) -> None:
        """``zeros.index_add(0, order // count, rows)``: the sum of each entry's rows."""
        args: Any = node.args
        base, dim, _, rows = args
        if dim != 0 or argument(node, "alpha") != 1 or shape(base)[0] * count != self.num_rows:
            return
        source = self.in_order[rows]
        apart = insert(node, aten.reshape.default, (source, [shape(base)[0], count, *shape(source)[1:]]))
        total = insert(node, aten.sum.dim_IntList, (apart, [1]))
        if base.target not in _FILLED:
            total = insert(node, aten.add.Tensor, (base, total))
        replace(node, total)

    def _of_sorted(self, node: fx.Node) -> None:
        """An operator on sorted rows."""
        if node.target in self.products:
            args: Any = node.args
            rows, weight, ends = args[0], args[1], argument(node, "offs")
            if rows in self.in_order and self._are_ends(ends, shape(weight)[0]):
                turned = _transposed(node, weight)
                product = insert(node, expert_linear, (self.in_order[rows], self.ids, turned))
                self.in_order[node] = product
        elif node.target in _COUNTS:
            node.update_arg(0, self.in_order[node.all_input_nodes[0]])
        else:
            counterpart = rebuild(node, self.in_order, 1)
            if counterpart is not None:
                self.in_order[node] = counterpart

    def _are_ends(self, ends: Any, num_experts: int) -> bool:
        """Whether ``ends`` are the places behind each expert's last row."""
        total = _without_casts(ends)
        if total.target is not aten.cumsum.default or argument(total, "dim") != 0:
            return False
        return shape(total) == (num_experts,) and self._are_counts(total.args[0])

    def _are_counts(self, node: Any) -> bool:
        """Whether ``node`` is how many of the ids each expert is."""
        counts = _without_casts(node)
        num_experts = shape(counts)[0]
        if counts.target is aten.histc.default:
            bounds = [argument(counts, name) for name in ("bins", "min", "max")]
            if bounds[:2] != [num_experts, 0] or bounds[2] not in (num_experts - 1, num_experts):
                return False
        elif counts.target is aten.scatter_add.default:  # as bincount is written out
            zeros, dim, ids, ones = counts.args
            adds_ones = isinstance(ones, fx.Node) and ones.target in (aten.ones_like.default, aten.ones.default)
            is_zero = isinstance(zeros, fx.Node) and zeros.target in _FILLED
            if not is_zero or not adds_ones or dim != 0 or len(shape(counts)) != 1:
                return False
            return self._are_ids(ids)
        elif counts.target is aten.sum.dim_IntList and counts.args[1:] == ([0],):
            counts = _without_casts(counts.args[0])
            if counts.target is aten.scatter.value:
                return self._marks_choices(counts, num_experts)
            if counts.target is not aten.one_hot.default or shape(counts)[-1] != num_experts:
                return False
        else:
            return False
        return self._are_ids(counts.args[0])

    def _are_ids(self, node: Any) -> bool:
        """Whether ``node`` is the ids, in their own order or sorted."""
        ids = _without_casts(node)
        return same_value(self.in_order.get(ids, ids), self.ids)

    def _marks_choices(self, node: fx.Node, num_experts: int) -> bool:
        """Whether ``node`` is zeros [tokens, experts] with a 1 at each of a token's choices, which the ids are."""
        zeros, dim, chosen, mark = node.args
        is_flat = self.ids.target is aten.reshape.default and self.ids.args[0] is chosen
        if not isinstance(zeros, fx.Node) or zeros.target not in _FILLED or not isinstance(chosen, fx.Node):
            return False
        is_mark = isinstance(mark, int) and mark == 1
        return is_flat and is_mark and dim in (1, -1) and shape(node)[1:] == (num_experts,) and are_distinct(chosen)


def _without_casts(node: Any) -> fx.Node:
    while node.target is aten.to.dtype:
        node = node.args[0]
    assert isinstance(node, fx.Node)
    return node


def _transposed(node: fx.Node, weight: Any) -> fx.Node:
    """``weight`` [experts, in, out] as [experts, out, in]."""
    if weight.target is aten.transpose.int and {dim % 3 for dim in weight.args[1:]} == {1, 2}:
        source: fx.Node = weight.args[0]
        return source
    return insert(node, aten.transpose.int, (weight, 1, 2))
