"""Products with gathered weights, ``bmm(weight[ids], x)``: a weight for each row's expert, without gathering any."""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.canonicalise.expert_rows import expert_linear
from passes.canonicalise.fx import aten, calls, insert, replace, shape, value


def name_gathered_experts(module: fx.GraphModule) -> None:
    """Replace batched products of which one side is ``weight[ids]`` by ``expert_linear``."""
    for node in calls(module.graph, aten.bmm.default, aten.matmul.default):
        _product(node)
    for node in calls(module.graph, aten.einsum.default):
        _einsum(node)


def _gathered(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """(weight [experts, …, …], ids) if ``node`` is ``weight[ids]``."""
    if not isinstance(node, fx.Node) or node.target is not aten.index.Tensor:
        return None
    weight, indices = node.args
    if len(indices) != 1 or len(shape(weight)) != 3 or value(indices[0]).is_floating_point():  # type: ignore[arg-type, index]
        return None
    ids: Any = indices[0]  # type: ignore[index]
    return (weight, ids) if "int" in str(value(ids).dtype) and "uint" not in str(value(ids).dtype) else None  # type: ignore[return-value]


def _product(node: fx.Node) -> None:
    """``weight[ids] @ x`` and ``x @ weight[ids]``, over the dims of the ids."""
    left, right = node.args
    for weights, other, first in ((left, right, True), (right, left, False)):
        pair = _gathered(weights)
        lead = shape(weights)[:-2]  # type: ignore[arg-type]
        if pair is None or not isinstance(other, fx.Node) or shape(other)[:-2] != lead:
            continue
        weight, ids = pair
        vectors = insert(node, aten.transpose.int, (other, -2, -1)) if first else other
        turned = weight if first else insert(node, aten.transpose.int, (weight, 1, 2))
        rows = insert(node, aten.unsqueeze.default, (ids, -1))
        if shape(vectors)[-2] == 1:
            vectors, rows = _without_dim(node, vectors, -2), ids
            product = insert(node, expert_linear, (vectors, rows, turned))
            replace(node, insert(node, aten.unsqueeze.default, (product, len(lead) + (1 if first else 0))))
        else:
            product = insert(node, expert_linear, (vectors, rows, turned))
            replace(node, insert(node, aten.transpose.int, (product, -2, -1)) if first else product)
        return


def _without_dim(node: fx.Node, source: fx.Node, dim: int) -> fx.Node:
    """``source.squeeze(dim)``; of what was unsqueezed (and transposed), the vectors themselves."""
    inner = source.args[0] if source.target is aten.transpose.int else source
    assert isinstance(inner, fx.Node)
    if inner.target is aten.unsqueeze.default and shape(inner.args[0]) == (*shape(source)[:-2], shape(source)[-1]):  # type: ignore[arg-type]
        return inner.args[0]  # type: ignore[return-value]
    return insert(node, aten.squeeze.dim, (source, dim))


def _einsum(node: fx.Node) -> None:
    """``einsum("beck,bk->bec", weight[ids], x)``: letters of the ids, then outputs and inputs."""
    equation, operands = str(node.args[0]).replace(" ", ""), node.args[1]
    left, arrow, result = equation.partition("->")
    letters = left.split(",")
    if not arrow or len(letters) != 2 or "." in equation:
        return
    for place in (0, 1):
        pair = _gathered(operands[place])  # type: ignore[index]
        if pair is None:
            continue
        (weight, ids), vectors = pair, operands[1 - place]  # type: ignore[index]
        lead, matrix, vector = letters[place][:-2], letters[place][-2:], letters[1 - place]
        inside = next((letter for letter in matrix if letter not in result), "")
        outside = matrix.replace(inside, "") if inside else ""
        if result != lead + outside or not vector.endswith(inside) or not inside:
            continue
        if [letter for letter in lead if letter in vector] != list(vector[:-1]):
            continue
        for dim, letter in enumerate(lead):
            if letter not in vector:
                vectors = insert(node, aten.unsqueeze.default, (vectors, dim))
        turned = weight if matrix == outside + inside else insert(node, aten.transpose.int, (weight, 1, 2))
        replace(node, insert(node, expert_linear, (vectors, ids, turned)))
        return
