"""The Triton side of the rotary embedding: one kernel for one or two tensors, laid out in any way.

A program takes a few positions with all their heads, and reads the cos and sin of a position once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from runtime.kernels.elementwise import wide_type
from runtime.kernels.language import tl, triton

#: Pairs of elements that a program turns at a time.
_TILE = 1024
#: The kernel finds a position by so many dims; what is more is looped over.
_POSITION_DIMS = 2


class Rotation(NamedTuple):
    """Which elements are pairs, and which way they turn."""

    #: Pairs are (2i, 2i + 1), or (i, i + half).
    interleaved: bool
    #: The transposed rotation, which gradients take.
    transposed: bool = False


class _Dim(NamedTuple):
    """A dim of all tensors, or several that lie together as one: its size, and each tensor's stride along it."""

    size: int
    strides: list[int]


def rotate(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
) -> None:
    """Write one or two tensors ``[..., width]``, rotated, to outputs of their shapes; in one launch where one can do.

    cos and sin, ``[..., rotated]``, broadcast against the inputs in all dims but the last.
    """
    full = [place for place, tensor in enumerate(inputs) if tensor.numel()]
    if not full:
        return
    inputs, outputs = [inputs[place] for place in full], [outputs[place] for place in full]
    tables = [_side_by_side(table)[(None,) * (inputs[0].dim() - table.dim())] for table in (cos, sin)]
    if len(inputs) == 2 and not _go_together(inputs, tables):
        for tensor, output in zip(inputs, outputs, strict=True):
            rotate([tensor], [output], cos, sin, rotation)
        return
    inputs = [_side_by_side(tensor) for tensor in inputs]
    _walk([inputs[0], outputs[0], inputs[-1], outputs[-1], *tables], rotation, is_pair=len(inputs) == 2)


def _side_by_side(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _differing(query: torch.Tensor, key: torch.Tensor) -> list[int]:
    return [dim for dim in range(query.dim() - 1) if query.shape[dim] != key.shape[dim]]


def _go_together(inputs: Sequence[torch.Tensor], tables: Sequence[torch.Tensor]) -> bool:
    """Whether two tensors differ at most in the number of heads, which have the same cos and sin."""
    query, key = inputs
    if query.dim() != key.dim():
        return False
    differing = _differing(query, key)
    return len(differing) <= 1 and all(table.shape[dim] == 1 for dim in differing for table in tables)


def _walk(tensors: Sequence[torch.Tensor], rotation: Rotation, *, is_pair: bool) -> None:
    """Launch over query, its output, key, its output, cos and sin: all of as many dims, rows side by side."""
    query, key, cos = tensors[0], tensors[2], tensors[4]
    head = _head_dim(tensors)
    order = [dim for dim in range(query.dim() - 1) if dim != head and query.shape[dim] > 1]
    order.sort(key=query.stride, reverse=True)
    positions = _joined([_Dim(query.shape[dim], _strides(tensors, dim)) for dim in order])
    if len(positions) > _POSITION_DIMS:
        for place in range(query.shape[order[0]]):
            part = [tensor.select(order[0], place if tensor.shape[order[0]] > 1 else 0) for tensor in tensors]
            _walk(part, rotation, is_pair=is_pair)
        return
    none = _Dim(1, [0] * len(tensors))
    outer, inner = [none] * (_POSITION_DIMS - len(positions)) + positions
    heads = none if head is None else _Dim(query.shape[head], _strides(tensors, head))
    strides = [step for steps in zip(outer.strides, inner.strides, heads.strides, strict=True) for step in steps]
    key_heads = 1 if head is None else key.shape[head]
    half = cos.shape[-1] // 2
    block = triton.next_power_of_2(max(half, 1))
    head_blocks = [min(triton.next_power_of_2(count), max(_TILE // block, 1)) for count in (heads.size, key_heads)]
    at_a_time = max(_TILE // (block * max(head_blocks)), 1)
    at_a_time = min(at_a_time, triton.next_power_of_2(outer.size * inner.size))
    rests = [tensor.shape[-1] - 2 * half for tensor in (query, key)]
    _kernel[(triton.cdiv(outer.size * inner.size, at_a_time),)](
        *tensors, *strides, outer.size * inner.size, inner.size, heads.size, key_heads,
        IS_PAIR=is_pair, INTERLEAVED=rotation.interleaved, TRANSPOSED=rotation.transposed,
        HALF=half, BLOCK=block, QUERY_REST=rests[0], KEY_REST=rests[1],
        BLOCK_REST=triton.next_power_of_2(max(*rests, 1)),
        POSITIONS=at_a_time, QUERY_HEADS=head_blocks[0], KEY_HEADS=head_blocks[1],
        WIDE=wide_type(next((tensor for tensor in tensors if tensor.dtype == torch.float64), query)),
    )  # fmt: skip


def _strides(tensors: Sequence[torch.Tensor], dim: int) -> list[int]:
    return [tensor.stride(dim) if tensor.shape[dim] > 1 else 0 for tensor in tensors]


def _head_dim(tensors: Sequence[torch.Tensor]) -> int | None:
    """The dim along which a program shares cos and sin: the heads, if these are what comes next in memory."""
    query, _, key, _, *tables = tensors
    differing = _differing(query, key)
    shared = [dim for dim in range(query.dim() - 1) if all(table.shape[dim] == 1 for table in tables)]
    return differing[0] if differing else min(shared, key=query.stride, default=None)


def _joined(dims: Sequence[_Dim]) -> list[_Dim]:
    """Dims, outermost first, with those made one that lie together in every tensor."""
    joined: list[_Dim] = []
    for dim in dims:
        if joined and joined[-1].strides == [dim.size * stride for stride in dim.strides]:
            joined[-1] = _Dim(joined[-1].size * dim.size, dim.strides)
        else:
            joined.append(dim)
    return joined


@triton.jit
def _load(rows, exists, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """First and second elements of the pairs of rows ``[positions, heads, 1]``."""
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK)[None, None, :]
        both = tl.load(rows + columns, mask=exists & (columns < 2 * HALF), other=0.0).to(WIDE)
        first, second = tl.split(tl.reshape(both, (both.shape[0], both.shape[1], BLOCK, 2)))
    else:
        columns = tl.arange(0, BLOCK)[None, None, :]
        exists = exists & (columns < HALF)
        first = tl.load(rows + columns, mask=exists, other=0.0).to(WIDE)
        second = tl.load(rows + HALF + columns, mask=exists, other=0.0).to(WIDE)
    return first, second


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    rows, exists, first, second, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr
):
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK)[None, None, :]
        both = tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1], 2 * BLOCK))
        tl.store(rows + columns, both, mask=exists & (columns < 2 * HALF))
    else:
        columns = tl.arange(0, BLOCK)[None, None, :]
        exists = exists & (columns < HALF)
        tl.store(rows + columns, first, mask=exists)
        tl.store(rows + HALF + columns, second, mask=exists)


@triton.jit
def _rotate_heads(  # type: ignore[no-untyped-def]
    input_ptr, out_ptr, input_head, out_head, num_heads, exists, first_cos, second_cos, first_sin, second_sin,
    HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """All heads of some positions, whose pointers are ``[positions, 1, 1]``."""
    for start in range(0, num_heads, HEADS):
        heads = (start + tl.arange(0, HEADS)).to(tl.int64)[None, :, None]
        here = exists & (heads < num_heads)
        rows, out_rows = input_ptr + heads * input_head, out_ptr + heads * out_head
        first, second = _load(rows, here, HALF, BLOCK, INTERLEAVED, WIDE)
        turned = first * first_cos + second * first_sin
        other = second * second_cos + first * second_sin
        _store(out_rows, here, turned, other, HALF, BLOCK, INTERLEAVED)
        if REST > 0:
            columns = tl.arange(0, BLOCK_REST)[None, None, :]
            here = here & (columns < REST)
            rest = tl.load(rows + 2 * HALF + columns, mask=here, other=0.0)
            tl.store(out_rows + 2 * HALF + columns, rest, mask=here)


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    query_ptr, query_out_ptr, key_ptr, key_out_ptr, cos_ptr, sin_ptr,
    query_outer, query_inner, query_head, query_out_outer, query_out_inner, query_out_head,
    key_outer, key_inner, key_head, key_out_outer, key_out_inner, key_out_head,
    cos_outer, cos_inner, cos_head, sin_outer, sin_inner, sin_head,
    num_positions, num_inner, num_query_heads, num_key_heads,
    IS_PAIR: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, QUERY_REST: tl.constexpr, KEY_REST: tl.constexpr,
    BLOCK_REST: tl.constexpr, POSITIONS: tl.constexpr, QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    position = (tl.program_id(0).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS))[:, None, None]
    exists = position < num_positions
    outer, inner = position // num_inner, position % num_inner
    first_cos, second_cos = _load(
        cos_ptr + outer * cos_outer + inner * cos_inner, exists, HALF, BLOCK, INTERLEAVED, WIDE
    )
    first_sin, second_sin = _load(
        sin_ptr + outer * sin_outer + inner * sin_inner, exists, HALF, BLOCK, INTERLEAVED, WIDE
    )
    # The first of a pair takes this much of the second, and the second this much of the first.
    if TRANSPOSED:
        of_second, of_first = second_sin, -first_sin
    else:
        of_second, of_first = -first_sin, second_sin
    _rotate_heads(
        query_ptr + outer * query_outer + inner * query_inner,
        query_out_ptr + outer * query_out_outer + inner * query_out_inner,
        query_head, query_out_head, num_query_heads, exists, first_cos, second_cos, of_second, of_first,
        HALF, BLOCK, QUERY_REST, BLOCK_REST, QUERY_HEADS, INTERLEAVED, WIDE,
    )  # fmt: skip
    if IS_PAIR:
        _rotate_heads(
            key_ptr + outer * key_outer + inner * key_inner,
            key_out_ptr + outer * key_out_outer + inner * key_out_inner,
            key_head, key_out_head, num_key_heads, exists, first_cos, second_cos, of_second, of_first,
            HALF, BLOCK, KEY_REST, BLOCK_REST, KEY_HEADS, INTERLEAVED, WIDE,
        )  # fmt: skip
