"""One way of saying each view: sizes spelled out, dims counted from the front.

``view``, ``flatten``, ``unflatten``, ``view_as`` and the like become ``aten.reshape`` to the whole static shape, a
reshape of a reshape becomes one, and dims are never negative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from passes.canonicalise.fx import argument, aten, calls, insert, is_tensor, replace, retarget, shape
from passes.torch_compat.operators import OpOverload, schema

_RESHAPES = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.ravel.default,
    aten.unflatten.int, aten.view_as.default, aten.reshape_as.default, aten.squeeze.default,
    aten.squeeze.dims, aten._reshape_alias.default,
}  # fmt: skip
_EXPANDS = {aten.expand.default, aten.expand_as.default, aten.broadcast_to.default}
#: Operators whose output has one dim more than their input, so that dim -1 is the new last one.
_ADDS_DIM = {aten.unsqueeze.default, aten.stack.default}


def normalise_views(module: fx.GraphModule) -> None:
    for node in calls(module.graph):
        if node.target in _REWRITES:
            _REWRITES[node.target](node)
        if isinstance(node.target, OpOverload):
            _count_from_the_front(node)


def fold_reshapes(module: fx.GraphModule) -> None:
    """A reshape of a reshape (or of an unsqueeze or squeeze) becomes one reshape, or none."""
    for node in calls(module.graph, aten.reshape.default):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        while source.target in _FOLDED:
            source = source.args[0]
            assert isinstance(source, fx.Node)
        if shape(source) == shape(node):
            replace(node, source)
        elif source is not node.args[0]:
            retarget(node, aten.reshape.default, (source, list(shape(node))))


_FOLDED = {aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim}


def _reshape(node: fx.Node) -> None:
    retarget(node, aten.reshape.default, (node.args[0], list(shape(node))))


def _expand(node: fx.Node) -> None:
    retarget(node, aten.expand.default, (node.args[0], list(shape(node))))


def _reverse(node: fx.Node) -> None:
    """``t`` and ``numpy_T``."""
    rank = len(shape(node))
    if rank < 2:
        replace(node, node.args[0])  # type: ignore[arg-type]
    elif rank == 2:
        retarget(node, aten.transpose.int, (node.args[0], 0, 1))
    else:
        retarget(node, aten.permute.default, (node.args[0], list(reversed(range(rank)))))


def _transpose(node: fx.Node) -> None:
    rank = len(shape(node))
    first, second = sorted(dim % rank for dim in node.args[1:3])  # type: ignore[operator]
    retarget(node, aten.transpose.int, (node.args[0], first, second))


def _matrix_transpose(node: fx.Node) -> None:
    rank = len(shape(node))
    retarget(node, aten.transpose.int, (node.args[0], rank - 2, rank - 1))


def _move(node: fx.Node) -> None:
    """``movedim`` as the permutation that it is."""
    rank = len(shape(node))
    source, destination = (
        [dims] if isinstance(dims, int) else list(dims)
        for dims in (argument(node, "source"), argument(node, "destination"))
    )
    order: list[int | None] = [None] * rank
    for old, new in zip(source, destination):
        order[new % rank] = old % rank
    rest = iter(dim for dim in range(rank) if dim not in order)
    retarget(node, aten.permute.default, (node.args[0], [next(rest) if dim is None else dim for dim in order]))


def _slice(node: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    dim = argument(node, "dim") % len(shape(source))
    size, step = shape(source)[dim], argument(node, "step")
    start, stop, _ = slice(argument(node, "start"), argument(node, "end")).indices(size)
    retarget(node, aten.slice.Tensor, (source, dim, start, max(start, stop), *(() if step == 1 else (step,))))


def _select(node: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    dim = argument(node, "dim") % len(shape(source))
    retarget(node, aten.select.int, (source, dim, argument(node, "index") % shape(source)[dim]))


def _split(node: fx.Node) -> None:
    """``chunk`` and ``split`` as ``split_with_sizes``."""
    dim = argument(node, "dim", 0) % len(shape(node.args[0]))  # type: ignore[arg-type]
    sizes = [piece.shape[dim] for piece in node.meta["val"]]
    retarget(node, aten.split_with_sizes.default, (node.args[0], sizes, dim))


def _type_of_repeat(node: fx.Node) -> None:
    """``repeat`` along dims of size 1 only is ``expand`` (after leading dims are added)."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    added = (1,) * (len(shape(node)) - len(shape(source)))
    sizes = (*added, *shape(source))
    if all(size == 1 or size == full for size, full in zip(sizes, shape(node))):
        whole = insert(node, aten.reshape.default, (source, list(sizes))) if added else source
        retarget(node, aten.expand.default, (whole, list(shape(node))))


_REWRITES: dict[Any, Callable[[fx.Node], None]] = {
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_EXPANDS, _expand),
    aten.transpose.int: _transpose,
    aten.t.default: _reverse,
    aten.numpy_T.default: _reverse,
    aten.mT.default: _matrix_transpose,
    aten.swapaxes.default: _transpose,
    aten.swapdims.default: _transpose,
    aten.movedim.int: _move,
    aten.movedim.intlist: _move,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.chunk.default: _split,
    aten.split.Tensor: _split,
    aten.split.sizes: _split,
    aten.repeat.default: _type_of_repeat,
}
#: Whose dim -1 is no dim: the norm is of all elements.
_NO_DIM = (aten._weight_norm.default, aten.norm_except_dim.default)


def _count_from_the_front(node: fx.Node) -> None:
    """Add the rank to every negative dim among the arguments."""
    assert isinstance(node.target, OpOverload)
    if node.target in _NO_DIM:
        return
    for index, entry in enumerate(schema(node.target).arguments[: len(node.args)]):
        if entry.name not in ("dim", "dims", "dim0", "dim1", "axis"):
            continue
        rank = _rank(node)
        dims = node.args[index]
        if rank and isinstance(dims, int) and dims < 0:
            node.update_arg(index, dims + rank)
        elif rank and isinstance(dims, (list, tuple)) and all(isinstance(dim, int) for dim in dims):
            node.update_arg(index, [dim % rank for dim in dims])  # type: ignore[operator]


def _rank(node: fx.Node) -> int:
    """The rank that negative dims of a call count from; 0 if it is not known."""
    source: Any = node.args[0]
    if isinstance(source, (list, tuple)) and source:
        source = source[0]
    if not isinstance(source, fx.Node) or not is_tensor(source):
        return 0
    return len(shape(source)) + (node.target in _ADDS_DIM)
