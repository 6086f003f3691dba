"""The same expression of every expert on its own rows, as one expression on all tokens and their choices.

Rows that experts pick from a table are the table itself; operators that treat rows alike are called once on all rows; a
linear layer of which every expert has its own becomes ``expert_linear``. Weights that are parameters of their own are
stacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from passes.canonicalise.expert_masks import RoutedTokens, expert_mask, laid_out_choices
from passes.canonicalise.expert_rows import expert_linear
from passes.canonicalise.fx import argument, aten, insert, is_random, is_tensor, shape, value
from passes.canonicalise.row_operators import rebuild
from passes.rules.expert_rules import STACKED_BY_LOOP
from passes.torch_compat.operators import OpOverload

#: Operators of a row and a vector.
_WITH_VECTORS = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
_LINEARS = (aten.linear.default, aten.mm.default, aten.matmul.default)
_CASTS = (aten.to.dtype, aten.alias.default, aten.detach.default)


class MaskPlaces(NamedTuple):
    """Where a mask is true, along some of its dims."""

    mask: fx.Node
    dims: tuple[int, ...]


def places_of(indices: Sequence[Any]) -> MaskPlaces | None:
    """The mask and its dims that tensors of indices stand for; None if they are others."""
    found = [_place_of(index) for index in indices]
    known = [entry for entry in found if entry is not None]
    if not known or len(known) != len(found) or len({entry.mask for entry in known}) != 1:
        return None
    dims = tuple(dim for entry in known for dim in entry.dims)
    return MaskPlaces(known[0].mask, dims) if len(set(dims)) == len(dims) else None


def _place_of(index: Any) -> MaskPlaces | None:
    if not isinstance(index, fx.Node) or not is_tensor(index):
        return None
    if "bool" in str(value(index).dtype):
        return MaskPlaces(index, tuple(range(len(shape(index)))))
    source: Any = index.args[0] if index.args else None
    if not isinstance(source, fx.Node) or source.target is not aten.nonzero_static.default:
        return None
    mask: Any = source.args[0]
    if index.target is aten.select.int and index.args[1] == 1:
        return MaskPlaces(mask, (index.args[2],))  # type: ignore[arg-type]
    is_column = index.target in (aten.squeeze.dim, aten.reshape.default) and len(shape(index)) == 1
    return MaskPlaces(mask, (0,)) if is_column and len(shape(mask)) == 1 else None


def root_of(mask: fx.Node) -> fx.Node:
    """The mask whose entries, in their order, are those of a flat one."""
    return mask.args[0] if mask.target is aten.reshape.default and len(shape(mask)) == 1 else mask  # type: ignore[return-value]


class ExpertRows:
    """What one loop computes, on all rows.

    Args:
        at: the node before which it is inserted.
        tokens: the expert of each choice of every token.
        masks: those of experts 0, 1, ….
    """

    def __init__(self, at: fx.Node, tokens: RoutedTokens, masks: Sequence[fx.Node]) -> None:
        self._at = at
        self._tokens = tokens
        self._masks = masks
        self._picked = _depending_on(masks[0])
        self._built: dict[tuple[fx.Node, ...], fx.Node] = {}

    def rows(self, nodes: Sequence[fx.Node]) -> fx.Node | None:
        """One expression of every expert's on all tokens and choices, [*tokens, K or 1, …]; None if there is none.

        Args:
            nodes: those of experts 0, 1, ….
        """
        key = tuple(nodes)
        if key not in self._built:
            built = self._table(nodes) or self._computed(nodes)
            if built is None:
                return None
            self._built[key] = built
        return self._built[key]

    def _table(self, nodes: Sequence[fx.Node]) -> fx.Node | None:
        """Rows of a table at the places of the masks."""
        entries = [_picked_table(node) for node in nodes]
        tables = [table for table, _ in filter(None, entries)]
        places = [each for _, each in filter(None, entries)]
        if len(tables) != len(nodes) or any(each.dims != places[0].dims for each in places):
            return None
        if any(root_of(each.mask) is not mask for each, mask in zip(places, self._masks)):
            return None
        dims = places[0].dims
        if places[0].mask is not self._masks[0]:
            dims = tuple(range(len(shape(self._masks[0]))))
            sizes = shape(self._masks[0])
            if shape(tables[0])[:1] != shape(places[0].mask):
                return None
            columns = _columns(tables, 1)
            if columns is not None:
                return self._chosen_columns(self._unflattened(columns, sizes))
            tables = [self._unflattened(each, sizes) for each in tables]
        if dims == self._tokens.token_dims:
            return self._of_tokens(tables)
        order = [dims.index(dim) for dim in (*self._tokens.token_dims, *dims) if dim in dims]
        order = list(dict.fromkeys(order))
        ids = shape(self._tokens.ids)
        is_whole = len(dims) == len(ids) and set(self._tokens.token_dims) < set(dims)
        if not is_whole or not all(same_value(table, tables[0]) for table in tables[1:]):
            return None
        if tuple(shape(tables[0])[place] for place in order) != ids:
            return None
        return laid_out_choices(self._at, tables[0], order)

    def _of_tokens(self, tables: Sequence[fx.Node]) -> fx.Node | None:
        """Rows of tokens, the same for every expert or each expert's column of one tensor."""
        at, num_dims = self._at, self._tokens.num_token_dims
        if shape(tables[0])[:num_dims] != self._tokens.token_shape:
            return None
        if all(same_value(table, tables[0]) for table in tables[1:]):
            table = tables[0]
            if self._tokens.single:
                return table
            is_number = table.target is aten.unsqueeze.default and table.args[1] in (-1, num_dims)
            if is_number and len(shape(table)) == num_dims + 1:  # scores[..., None]
                numbers = insert(at, aten.unsqueeze.default, (table.args[0], num_dims))
                return insert(at, aten.unsqueeze.default, (numbers, num_dims + 1))
            return insert(at, aten.unsqueeze.default, (table, num_dims))
        if self._tokens.single:
            return None
        columns = _columns(tables, num_dims)
        if columns is not None:
            return self._chosen_columns(columns)
        chosen = [_of_choices(table, expert) for expert, table in enumerate(tables)]
        if chosen[0] is None or any(each != chosen[0] for each in chosen) or not self._tokens.distinct:
            return None
        scores, source = chosen[0]
        if shape(scores) != shape(self._tokens.ids) or expert_mask(self._masks[0]).source is not source:  # type: ignore[union-attr]
            return None
        return scores

    def _unflattened(self, table: fx.Node, sizes: tuple[int, ...]) -> fx.Node:
        return insert(self._at, aten.reshape.default, (table, [*sizes, *shape(table)[1:]]))

    def _chosen_columns(self, whole: fx.Node) -> fx.Node:
        """Each choice's own entry of [*tokens, experts]."""
        ids = self._tokens.ids
        if self._tokens.valid is not None:
            ids = insert(self._at, aten.clamp.default, (ids, 0))
        return insert(self._at, aten.gather.default, (whole, self._tokens.num_token_dims, ids))

    def _computed(self, nodes: Sequence[fx.Node]) -> fx.Node | None:
        """The same operator on rows of every expert."""
        first, at = nodes[0], self._at
        if not all(alike(first, node) for node in nodes):
            return None
        rows: dict[fx.Node, fx.Node] = {}
        own: dict[fx.Node, list[fx.Node]] = {}
        seen: dict[fx.Node, tuple[fx.Node, ...]] = {}
        for operands in zip(*map(operands_of, nodes)):
            if seen.setdefault(operands[0], operands) != operands:
                return None
            if operands[0] in self._picked:
                built = self.rows(operands)
                if built is None:
                    return None
                rows[operands[0]] = built
            elif not all(same_value(operands[0], operand) for operand in operands):
                own[operands[0]] = list(operands)
        if not rows:
            return None
        if own:
            return self._with_weights(first, rows, own)
        if first.target is aten.dropout.default:
            (source,) = rows.values()
            every_choice = [*shape(self._tokens.ids), *shape(first)[1:]]
            spread = insert(at, aten.expand.default, (source, every_choice))
            return insert(at, aten.dropout.default, (spread, *first.args[1:]))
        with_rows = rebuild(first, rows, len(shape(self._tokens.ids)))
        if with_rows is not None and with_rows.op == "call_function":
            at.prepend(with_rows)  # it was inserted where the first expert stands, and depends on what stands here
        return with_rows

    def _with_weights(
        self, first: fx.Node, rows: Mapping[fx.Node, fx.Node], own: Mapping[fx.Node, Sequence[fx.Node]]
    ) -> fx.Node | None:
        """A linear layer, or an operator with a vector, of which every expert has its own."""
        at, ids, args = self._at, self._tokens.ids, list[Any](first.args)
        sizes = {operand: {shape(weight) for weight in weights} for operand, weights in own.items()}
        if any(len(each) != 1 for each in sizes.values()):
            return None
        if first.target not in (*_LINEARS, *_WITH_VECTORS):
            return None
        stacked = {operand: _stacked(at, weights) for operand, weights in own.items()}
        if first.target in _LINEARS:
            return self._linear(first, rows, stacked)
        if any(len(shape(vectors)) != 2 for vectors in stacked.values()) or len(shape(first)) != 2:
            return None
        each_row = {vector: insert(at, aten.index.Tensor, (all_, [ids])) for vector, all_ in stacked.items()}
        operands = [each_row.get(arg, rows.get(arg, arg)) for arg in args]
        return insert(at, first.target, tuple(operands), dict(first.kwargs))  # type: ignore[arg-type]

    def _linear(
        self, first: fx.Node, rows: Mapping[fx.Node, fx.Node], stacked: Mapping[fx.Node, fx.Node]
    ) -> fx.Node | None:
        at, ids, args = self._at, self._tokens.ids, list[Any](first.args)
        source, weight = rows.get(args[0]), stacked.get(args[1])
        if source is None or weight is None or len(shape(weight)) != 3 or len(shape(args[0])) != 2:
            return None
        if first.target is not aten.linear.default:
            is_turned = weight.target is aten.transpose.int and weight.args[1:] == (1, 2)
            weight = weight.args[0] if is_turned else insert(at, aten.transpose.int, (weight, 1, 2))  # type: ignore[assignment]
        product = insert(at, expert_linear, (source, ids, weight))
        bias = argument(first, "bias") if first.target is aten.linear.default else None
        if bias is None:
            return product
        biases = stacked.get(bias)
        each = insert(at, aten.index.Tensor, (biases, [ids])) if biases is not None else bias
        return insert(at, aten.add.Tensor, (product, each))


def row_operators_of(rows: fx.Node, mask: fx.Node) -> tuple[object, ...]:
    """The operators, each one once, that lead from the rows that a mask picks to ``rows``."""
    picked, order = _depending_on(mask), dict[fx.Node, None]()
    stack = [rows]
    while stack:
        node = stack.pop()
        if node in picked and node not in order:
            order[node] = None
            stack += operands_of(node)
    return tuple(node.target for node in order)


def _depending_on(mask: fx.Node) -> set[fx.Node]:
    """Everything that is computed of the rows that a mask, or the same mask flat, picks."""
    masks = [mask, *(user for user in mask.users if root_of(user) is mask)]
    stack = [user for each in masks for user in each.users if user.target is aten.nonzero_static.default]
    found: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.users
    return found


def _picked_table(node: fx.Node) -> tuple[fx.Node, MaskPlaces] | None:
    """(table, places) if ``node`` is ``table[places]``, also with a dim of one in front."""
    if node.target is aten.reshape.default:
        inner: Any = node.args[0]
        if inner.target is aten.index.Tensor and inner.args[1][0] is None and shape(inner)[1:] == shape(node):
            table = inner.args[0]
            if table.target is aten.unsqueeze.default and table.args[1] == 0:
                places = places_of(inner.args[1][1:])
                return None if places is None else (table.args[0], places)
        return None
    if node.target is not aten.index.Tensor:
        return None
    places = places_of(node.args[1])  # type: ignore[arg-type]
    return None if places is None else (node.args[0], places)  # type: ignore[return-value]


def _columns(tables: Sequence[fx.Node], num_dims: int) -> fx.Node | None:
    """The tensor of which each expert's table is its entry along the last dim: a number for each token."""
    whole: Any = tables[0].args[0] if tables[0].target is aten.select.int else None
    for expert, table in enumerate(tables):
        if table.target is not aten.select.int or len(shape(table)) != num_dims or table.args[0] is not whole:
            return None
        if table.args[1] not in (num_dims, -1) or table.args[2] != expert:
            return None
    return whole  # type: ignore[no-any-return]


def _of_choices(table: fx.Node, expert: int) -> tuple[fx.Node, fx.Node] | None:
    """(scores, ids) if a table is ``(scores * (ids == expert)).sum(-1)``."""
    if table.target is not aten.sum.dim_IntList or argument(table, "keepdim"):
        return None
    product: Any = table.args[0]
    rank = len(shape(product))
    if table.args[1] not in ([-1], [rank - 1]) or product.target is not aten.mul.Tensor:
        return None
    for scores, equal in (product.args, product.args[::-1]):
        while isinstance(equal, fx.Node) and equal.target in _CASTS:
            equal = equal.args[0]
        mask = expert_mask(equal) if isinstance(equal, fx.Node) else None
        if mask is not None and mask.form == "equal" and mask.expert == expert and isinstance(scores, fx.Node):
            return (scores, mask.source) if shape(scores) == shape(product) == shape(equal) else None
    return None


def _stacked(at: fx.Node, weights: Sequence[fx.Node]) -> fx.Node:
    """The experts' weights as one tensor: that of which they are entries, or all of them beside each other."""
    if all(node.target is aten.transpose.int and len(shape(node)) == 2 for node in weights):
        return insert(at, aten.transpose.int, (_stacked(at, [node.args[0] for node in weights]), 1, 2))  # type: ignore[misc]
    entries = [(node.args[0], *node.args[1:]) if node.target is aten.select.int else None for node in weights]
    whole = weights[0].args[0] if entries[0] is not None else None
    if isinstance(whole, fx.Node) and entries == [(whole, 0, place) for place in range(shape(whole)[0])]:
        return whole
    return insert(at, aten.stack.default, (list(weights),), dict(STACKED_BY_LOOP))


def alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes call one operator with the same numbers, but for the numbers of their rows."""
    if one.target is not other.target or len(operands_of(one)) != len(operands_of(other)):
        return False
    if one.target in (aten.reshape.default, aten.expand.default):
        return shape(one)[1:] == shape(other)[1:]
    return repr(fx.map_arg((one.args, one.kwargs), _blank)) == repr(fx.map_arg((other.args, other.kwargs), _blank))


def _blank(node: fx.Node) -> None:
    return None


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The operands in the order of the call, with repeats."""
    operands: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), operands.append)
    return operands


def same_value(one: fx.Node, other: fx.Node, depth: int = 4) -> bool:
    """Whether two nodes have one value: the same calls on the same nodes, none of them random."""
    if one is other:
        return True
    if not depth or one.op != "call_function" or not isinstance(one.target, OpOverload):
        return False
    if not alike(one, other) or is_random(one) or shape(one) != shape(other):
        return False
    pairs = zip(operands_of(one), operands_of(other))
    return all(same_value(left, right, depth - 1) for left, right in pairs)
