"""Operators that treat every row (index of the first dim) alike, on rows that are laid out otherwise.

``rebuild`` makes the same call on operands whose first dim is several dims, or whose rows stand in another order: both
are possible where no row knows of another.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from passes.canonicalise.cross_entropy_form import cross_entropy
from passes.canonicalise.expert_rows import expert_linear
from passes.canonicalise.fx import argument, aten, insert, is_random, is_tensor, shape
from passes.canonicalise.loss_reductions import ELEMENTWISE_LOSSES
from passes.rules.rule_table import RULES
from passes.torch_compat.operators import OpOverload, schema, tree_leaves

#: Node → the node that has its rows in the new layout.
Rows = Mapping[fx.Node, fx.Node]


def rebuild(node: fx.Node, rows: Rows, num_dims: int) -> fx.Node | None:
    """``node`` with its rows in a new layout, inserted before it; None if it does not treat rows alike.

    Args:
        rows: the operands that are laid out anew.
        num_dims: how many dims take the place of the first.
    """
    if node.target is operator.getitem:
        return insert(node, operator.getitem, (rows[node.args[0]], node.args[1]))  # type: ignore[index]
    if not isinstance(node.target, OpOverload):
        own = _OWN_BUILDERS.get(node.target)
        return own(node, rows) if own is not None else None
    if is_random(node) or not _first_dims_agree(node, rows):
        return None
    builder = _BUILDERS.get(node.target)
    if builder is None and is_pointwise(str(node.target)):
        builder = _pointwise
    return builder(node, rows, num_dims - 1) if builder is not None else None


def _first_dims_agree(node: fx.Node, rows: Rows) -> bool:
    """Whether the result has as many rows as every operand that is laid out anew."""
    results = [leaf for leaf in tree_leaves(node.meta.get("val")) if hasattr(leaf, "shape")]
    counts = {tuple(result.shape[:1]) for result in results}
    counts |= {shape(operand)[:1] for operand in node.all_input_nodes if operand in rows and is_tensor(operand)}
    return len(counts) == 1 and () not in counts


def is_pointwise(op: str) -> bool:
    line = RULES.get(op, "").removeprefix("~")
    operands, arrow, result = line.partition("->")
    plain = operands.replace("+", ",").replace("/", ",").split(",")
    return bool(arrow) and result.strip() == "..." and all(operand.strip() == "..." for operand in plain)


def _replaced(node: fx.Node, rows: Rows, changes: Mapping[str, Any] | None = None) -> fx.Node:
    """The same call on the rows laid out anew, with other values for the arguments in ``changes``."""
    assert isinstance(node.target, OpOverload)
    names = [entry.name for entry in schema(node.target).arguments]
    args = [(changes or {}).get(name, value) for name, value in zip(names, node.args)]
    kwargs = {name: (changes or {}).get(name, value) for name, value in node.kwargs.items()}
    args, kwargs = fx.map_arg((args, kwargs), lambda operand: rows.get(operand, operand))
    return insert(node, node.target, tuple(args), dict(kwargs))


def _pointwise(node: fx.Node, rows: Rows, more: int) -> fx.Node | None:
    rank = len(shape(node))
    for operand in node.all_input_nodes:
        size = shape(operand)
        if operand in rows:
            if len(size) != rank:
                return None
        elif len(size) == rank and size[0] != 1:
            return None
    return _replaced(node, rows)


def _along(*names: str, new: int = 0) -> Callable[[fx.Node, Rows, int], fx.Node | None]:
    """Operators that work along the dims in their arguments ``names``; ``new``: dims that the result has more."""

    def build(node: fx.Node, rows: Rows, more: int) -> fx.Node | None:
        operands = node.all_input_nodes
        rank = len(shape(operands[0])) + new
        if any(operand not in rows for operand in operands):
            return None
        changes: dict[str, Any] = {}
        for name in names:
            dims = argument(node, name)
            if dims is None or dims == []:
                return None
            listed = [dim % rank for dim in (dims if isinstance(dims, (list, tuple)) else (dims,))]
            if 0 in listed:
                return None
            moved = [dim + more for dim in listed]
            changes[name] = moved if isinstance(dims, (list, tuple)) else moved[0]
        return _replaced(node, rows, changes)

    return build


def _first_operand(node: fx.Node, rows: Rows, more: int) -> fx.Node | None:
    """Operators of the last dims of their first operand, with parameters that have no rows."""
    first, *others = node.all_input_nodes
    return _replaced(node, rows) if first in rows and not any(other in rows for other in others) else None


def _linear(node: fx.Node, rows: Rows, more: int) -> fx.Node | None:
    return _first_operand(node, rows, more) if len(shape(node.all_input_nodes[0])) > 1 else None


def _matmul(node: fx.Node, rows: Rows, more: int) -> fx.Node | None:
    left, right = node.args
    if left not in rows or right in rows or len(shape(left)) < 2 or len(shape(right)) != 2:  # type: ignore[arg-type]
        return None
    return insert(node, aten.matmul.default, (rows[left], right))  # type: ignore[index]


def _norm(node: fx.Node, rows: Rows, more: int) -> fx.Node | None:
    sizes: Any = argument(node, "normalized_shape")
    return _first_operand(node, rows, more) if len(shape(node)) > len(sizes) else None


def _reshape(node: fx.Node, rows: Rows, more: int) -> fx.Node | None:
    source = rows[node.all_input_nodes[0]]
    return insert(node, aten.reshape.default, (source, [*shape(source)[: more + 1], *shape(node)[1:]]))


def _expand(node: fx.Node, rows: Rows, more: int) -> fx.Node | None:
    (operand,) = node.all_input_nodes
    if len(shape(operand)) != len(shape(node)):
        return None
    source = rows[operand]
    return insert(node, aten.expand.default, (source, [*shape(source)[: more + 1], *shape(node)[1:]]))


def _index(node: fx.Node, rows: Rows, more: int) -> fx.Node | None:
    """Rows of a table, picked by indices that are laid out anew."""
    table, indices = node.args
    if table in rows or len(indices) != 1:  # type: ignore[arg-type]
        return None
    return insert(node, aten.index.Tensor, (table, [rows[indices[0]]]))  # type: ignore[index]


def _embedding(node: fx.Node, rows: Rows, more: int) -> fx.Node | None:
    return _replaced(node, rows) if node.args[0] not in rows else None


def _expert_linear(node: fx.Node, rows: Rows) -> fx.Node | None:
    source, ids, weight = node.args
    ranks = {len(shape(source)) - 1, len(shape(ids))}  # type: ignore[arg-type]
    if source not in rows or ids not in rows or weight in rows or len(ranks) != 1:
        return None
    return insert(node, expert_linear, (rows[source], rows[ids], weight))  # type: ignore[index]


def _cross_entropy(node: fx.Node, rows: Rows) -> fx.Node | None:
    logits, target = node.args[:2]
    if logits not in rows or target not in rows:
        return None
    return insert(node, cross_entropy, (rows[logits], rows[target], *node.args[2:]), dict(node.kwargs))  # type: ignore[index]


_OWN_BUILDERS: dict[Any, Callable[[fx.Node, Rows], fx.Node | None]] = {
    expert_linear: _expert_linear,
    cross_entropy: _cross_entropy,
}

_Builder = Callable[[fx.Node, Rows, int], fx.Node | None]
_BUILDERS: dict[Any, _Builder] = {
    **dict.fromkeys(
        (
            aten.softmax.int, aten.log_softmax.int, aten.topk.default, aten.sort.default, aten.sum.dim_IntList,
            aten.mean.dim, aten.amax.default, aten.amin.default, aten.argmax.default, aten.max.dim, aten.min.dim,
            aten.cumsum.default, aten.cumprod.default, aten.split_with_sizes.default, aten.slice.Tensor,
            aten.select.int, aten.unbind.int, aten.squeeze.dim, aten.gather.default, aten.scatter.value,
            aten.scatter.src, aten.scatter_add.default, aten.cat.default, aten.logsumexp.default, aten.any.dim,
            aten.all.dim, aten.prod.dim_int, aten.linalg_vector_norm.default, aten.argsort.default,
        ),
        _along("dim"),
    ),
    **dict.fromkeys((aten.unsqueeze.default, aten.stack.default), _along("dim", new=1)),
    aten.flip.default: _along("dims"),
    aten.transpose.int: _along("dim0", "dim1"),
    aten.linear.default: _linear,
    **dict.fromkeys((aten.mm.default, aten.matmul.default), _matmul),
    **dict.fromkeys((aten.rms_norm.default, aten.layer_norm.default), _norm),
    **dict.fromkeys(ELEMENTWISE_LOSSES, _pointwise),
    aten.one_hot.default: _first_operand,
    aten.reshape.default: _reshape,
    aten.expand.default: _expand,
    aten.index.Tensor: _index,
    aten.embedding.default: _embedding,
}  # fmt: skip
