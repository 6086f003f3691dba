"""Rules of views: operators that only split, merge, move, add or drop dims.

A dim that a view splits or merges becomes a composite dim: its outermost factor may be cut, on both sides alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from passes.rules.operator_call import OperatorCall, named_dims
from passes.rules.rule import Dims, Factor, ShardingRule

LINEAR_IN_FIRST = ((0,),)


def reshape_dims(source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims, dict[Factor, int]]:
    """Factors of both sides of a reshape, and their sizes.

    Both shapes are read from the left: each step takes the largest factor common to the dim at hand on both sides, as
    long as it is all that is left of one of them. Where neither divides the other (6, 4 → 4, 6) their greatest common
    divisor may still be cut, and nothing further of that group.
    """
    dims: tuple[list[list[Factor]], list[list[Factor]]] = ([[] for _ in source], [[] for _ in target])
    sizes: dict[Factor, int] = {}
    if 0 in source:
        return _frozen(dims[0]), _frozen(dims[1]), sizes
    source_dims = [[dim, size] for dim, size in enumerate(source) if size != 1]
    target_dims = [[dim, size] for dim, size in enumerate(target) if size != 1]
    while source_dims and target_dims:
        (in_dim, in_size), (out_dim, out_size) = source_dims[0], target_dims[0]
        piece = math.gcd(in_size, out_size)
        if piece > 1:
            factor = f"f{len(sizes)}"
            sizes[factor] = piece
            dims[0][in_dim].append(factor)
            dims[1][out_dim].append(factor)
        if piece not in (in_size, out_size):
            _skip_group(source_dims, target_dims)
            continue
        for side in (source_dims, target_dims):
            side[0][1] //= piece
            if side[0][1] == 1:
                side.pop(0)
    return _frozen(dims[0]), _frozen(dims[1]), sizes


def _skip_group(source_dims: list[list[int]], target_dims: list[list[int]]) -> None:
    """Drop dims from both sides up to where their products agree again."""
    counts = [source_dims.pop(0)[1], target_dims.pop(0)[1]]
    while counts[0] != counts[1]:
        side = 0 if counts[0] < counts[1] else 1
        counts[side] *= (source_dims, target_dims)[side].pop(0)[1]


def _frozen(dims: list[list[Factor]]) -> Dims:
    return tuple(tuple(factors) for factors in dims)


def reshape(call: OperatorCall) -> ShardingRule:
    """``view``, ``reshape``, ``flatten``, ``unflatten``, ``squeeze``, ``unsqueeze``: the shapes say it all."""
    source, target, sizes = reshape_dims(call.inputs[0].shape, call.outputs[0].shape)
    inputs = [source, *(target for _ in call.inputs[1:])]  # view_as: the other operand only lends its shape
    terms = LINEAR_IN_FIRST if len(call.inputs) == 1 else None
    return call.rule(inputs, [target], terms=terms, sizes=sizes)


def is_reshape(op: str) -> bool:
    """Whether the factors of an operator are those of ``reshape_dims``, numbered in order past dims of size 1."""
    return COMPUTED.get(op) is reshape


def _moved(order: Callable[[OperatorCall, int], Sequence[int]]) -> Callable[[OperatorCall], ShardingRule]:
    """A rule for a reordering of dims: ``order`` gives the source dim of each output dim."""

    def rule(call: OperatorCall) -> ShardingRule:
        dims = named_dims(call.inputs[0].shape)
        return call.rule([dims], [tuple(dims[dim] for dim in order(call, len(dims)))], terms=LINEAR_IN_FIRST)

    return rule


def _swapped(first: int, second: int, rank: int) -> list[int]:
    order = list(range(rank))
    if rank:
        order[first % rank], order[second % rank] = order[second % rank], order[first % rank]
    return order


def _move_order(call: OperatorCall, rank: int) -> list[int]:
    """Source dim of each output dim of ``movedim``."""

    def listed(name: str) -> list[int]:
        argument = call[name]
        return [dim % rank for dim in (argument if isinstance(argument, (list, tuple)) else [argument])]

    placed = dict(zip(listed("destination"), listed("source")))
    rest = iter(dim for dim in range(rank) if dim not in placed.values())
    return [placed[dim] if dim in placed else next(rest) for dim in range(rank)]


transpose = _moved(lambda call, rank: _swapped(call["dim0"], call["dim1"], rank))
swap = _moved(lambda call, rank: _swapped(call["axis0"], call["axis1"], rank))
matrix_transpose = _moved(lambda call, rank: _swapped(rank - 1, rank - 2, rank) if rank > 1 else list(range(rank)))
permute = _moved(lambda call, rank: [dim % rank for dim in call["dims"]])
reverse = _moved(lambda call, rank: list(reversed(range(rank))))
move = _moved(_move_order)


def expand(call: OperatorCall) -> ShardingRule:
    """``expand``: a dim that is repeated stands in the output alone, so that cutting it leaves the input whole."""
    source, target = call.inputs[0].shape, call.outputs[0].shape
    out_dims = named_dims(target)
    new = len(target) - len(source)
    in_dims = tuple(out_dims[new + dim] if size == target[new + dim] else () for dim, size in enumerate(source))
    inputs = [in_dims, *(out_dims for _ in call.inputs[1:])]
    return call.rule(inputs, [out_dims], terms=LINEAR_IN_FIRST if len(inputs) == 1 else None)


def repeat(call: OperatorCall) -> ShardingRule:
    """``repeat``: repeated dims stay whole."""
    source, target = call.inputs[0].shape, call.outputs[0].shape
    new = len(target) - len(source)
    dims = named_dims(source, whole=[dim for dim, size in enumerate(source) if size != target[new + dim]])
    return call.rule([dims], [((),) * new + dims], terms=LINEAR_IN_FIRST)


def repeat_interleave(call: OperatorCall) -> ShardingRule | None:
    """``repeat_interleave`` by a number: the copies of an entry stand beside it, so the dim is (entry, copy)."""
    if call.get("dim") is None or len(call.inputs) != 1:
        return None
    shape = call.inputs[0].shape
    dim = call.dim("dim", len(shape))
    dims = named_dims(shape)
    out_dims = tuple((*factors, "copy") if place == dim and factors else factors for place, factors in enumerate(dims))
    return call.rule([dims], [out_dims], terms=LINEAR_IN_FIRST, sizes={"copy": call["repeats"]})


COMPUTED: dict[str, Callable[[OperatorCall], ShardingRule | None]] = {
    "aten.view.default": reshape,
    "aten._unsafe_view.default": reshape,
    "aten.reshape.default": reshape,
    "aten.view_as.default": reshape,
    "aten.reshape_as.default": reshape,
    "aten.flatten.using_ints": reshape,
    "aten.ravel.default": reshape,
    "aten.unflatten.int": reshape,
    "aten.squeeze.default": reshape,
    "aten.squeeze.dim": reshape,
    "aten.squeeze.dims": reshape,
    "aten.unsqueeze.default": reshape,
    "aten.transpose.int": transpose,
    "aten.swapaxes.default": swap,
    "aten.swapdims.default": transpose,
    "aten.t.default": reverse,
    "aten.numpy_T.default": reverse,
    "aten.mT.default": matrix_transpose,
    "aten.adjoint.default": matrix_transpose,
    "aten.permute.default": permute,
    "aten.movedim.int": move,
    "aten.movedim.intlist": move,
    "aten.expand.default": expand,
    "aten.expand_as.default": expand,
    "aten.broadcast_to.default": expand,
    "aten.repeat.default": repeat,
    "aten.repeat_interleave.self_int": repeat_interleave,
}
