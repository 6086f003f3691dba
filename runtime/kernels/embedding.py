"""Embedding, whose gradient is the same on every run, and is summed in at least float32.

On a GPU, indices are sorted (stably), and each run of equal ones becomes a row of the gradient. Runs are cut into
pieces at multiples of a fixed number of sorted positions: a run of one piece is summed and written at once, a longer
one (padding, a frequent word) by many programs, whose sums are then added in order.
"""

from __future__ import annotations

from typing import Any

import torch

from runtime.kernels.direct import are_plain, nobody_listens
from runtime.kernels.elementwise import wide_type
from runtime.kernels.language import tl, triton
from runtime.kernels.library import WIDE, differentiable, differentiable_again, in_dtype, register, wide, wide_dtype

#: Sorted positions to a chunk, at whose ends runs are cut; and rows that a program adds at a time.
_CHUNK, _ROWS = 64, 4
#: At most so many columns to a program; and elements of sums that a program of the second stage adds at a time.
_MOST_COLUMNS, _TILE = 1024, 4096


def embedding(indices: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """Rows of ``weight``, as ``F.embedding``; backward keeps the indices only.

    Args:
        indices: ``[...]``, int32 or int64.
        weight: ``[count, width]``.
        padding_idx: a row that gets no gradient; negative counts from the end.

    Returns:
        ``[..., width]``.

    Raises:
        ValueError: for a weight without two dims, or a padding_idx that is no row.
    """
    if weight.dim() != 2:
        raise ValueError(f"weight is {tuple(weight.shape)}: expected [count, width]")
    count = weight.shape[0]
    if padding_idx is not None:
        if not -count <= padding_idx < count:
            raise ValueError(f"padding_idx={padding_idx}: expected a row of the weight, {-count} to {count - 1}")
        padding_idx %= count
    if weight.is_cpu and weight.dtype in WIDE and nobody_listens() and are_plain((indices, weight)):
        # torch's own keeps the same, computes the same, and is called without Python in between.
        return torch.embedding(weight, indices, -1 if padding_idx is None else padding_idx)
    result: torch.Tensor = _forward(indices, weight, padding_idx)
    return result


def _take(indices: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    return torch.embedding(weight, indices)


def _aten_backward(grad: torch.Tensor, indices: torch.Tensor, num_rows: int, padding_idx: int | None) -> torch.Tensor:
    none = -1 if padding_idx is None else padding_idx
    rows = torch.ops.aten.embedding_dense_backward(wide(grad).contiguous(), indices, num_rows, none, False)
    return in_dtype(rows, grad.dtype)


def _plain_backward(grad: torch.Tensor, indices: torch.Tensor, num_rows: int, padding_idx: int | None) -> torch.Tensor:
    rows = grad if padding_idx is None else grad.masked_fill((indices == padding_idx).unsqueeze(-1), 0.0)
    zeros = rows.new_zeros((num_rows, rows.shape[-1]))
    return zeros.index_add(0, indices.flatten(), rows.reshape(-1, rows.shape[-1]))


@triton.jit
def _pieces_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, indices_ptr, places_ptr, out_ptr, heads_ptr, tails_ptr, num_places, grad_stride, width, padding,
    WIDE: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the piece of a run that starts at this program's sorted position, if one does."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(indices_ptr + place)
    before = tl.load(indices_ptr + place - 1, mask=place > 0, other=-1)
    begins = before != row
    if (row != padding) & (begins | (place % CHUNK == 0)):
        chunk = place // CHUNK
        end = tl.minimum((chunk + 1) * CHUNK, num_places)
        within = place + tl.arange(0, CHUNK)
        rest = tl.load(indices_ptr + within, mask=within < end, other=-1)
        length = tl.sum((rest == row).to(tl.int32), axis=0)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
        for start in range(0, length, ROWS):
            steps = start + tl.arange(0, ROWS)
            row_places = tl.load(places_ptr + place + steps, mask=steps < length, other=0).to(tl.int64)
            exists = (steps < length)[:, None] & (columns < width)[None, :]
            total += tl.load(
                grad_ptr + row_places[:, None] * grad_stride + columns[None, :], mask=exists, other=0.0
            ).to(WIDE)
        piece = tl.sum(total, axis=0)
        after = tl.load(indices_ptr + place + length, mask=place + length < num_places, other=-1)
        if begins & (after != row):
            tl.store(out_ptr + row.to(tl.int64) * width + columns, piece, mask=columns < width)
        elif begins:
            tl.store(tails_ptr + chunk * width + columns, piece, mask=columns < width)
        else:
            tl.store(heads_ptr + chunk * width + columns, piece, mask=columns < width)


@triton.jit
def _runs_kernel(  # type: ignore[no-untyped-def]
    indices_ptr, out_ptr, heads_ptr, tails_ptr, num_places, num_chunks, width, padding,
    WIDE: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the pieces of a run that starts in this program's chunk and goes on after it, if one does."""
    chunk = tl.program_id(0).to(tl.int64)
    first, next_first = chunk * CHUNK, (chunk + 1) * CHUNK
    row = tl.load(indices_ptr + next_first - 1, mask=next_first < num_places, other=-1)
    goes_on = row == tl.load(indices_ptr + next_first, mask=next_first < num_places, other=-2)
    before = tl.load(indices_ptr + first - 1, mask=first > 0, other=-1)
    if goes_on & (before != row) & (row != padding):
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        tail = tl.load(tails_ptr + chunk * width + columns, mask=columns < width, other=0.0)
        total = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
        start = chunk + 1
        while start < num_chunks:
            chunks = start + tl.arange(0, ROWS)
            same = tl.load(indices_ptr + chunks * CHUNK, mask=chunks < num_chunks, other=-1) == row
            exists = same[:, None] & (columns < width)[None, :]
            total += tl.load(heads_ptr + chunks[:, None] * width + columns[None, :], mask=exists, other=0.0)
            # Indices are sorted: where the last of these is another, so are all after it.
            start = tl.where(tl.sum(same.to(tl.int32), axis=0) == ROWS, start + ROWS, num_chunks)
        tl.store(out_ptr + row.to(tl.int64) * width + columns, tail + tl.sum(total, axis=0), mask=columns < width)


def _triton_backward(grad: torch.Tensor, indices: torch.Tensor, num_rows: int, padding_idx: int | None) -> torch.Tensor:
    width = grad.shape[-1]
    out = grad.new_zeros((num_rows, width))
    if not grad.numel():
        return out
    rows = grad.reshape(-1, width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    ordered, places = torch.sort(indices.reshape(-1), stable=True)
    num_places = places.numel()
    num_chunks = triton.cdiv(num_places, _CHUNK)
    heads, tails = grad.new_empty((2, num_chunks, width), dtype=wide_dtype(grad))
    padding = -1 if padding_idx is None else padding_idx
    columns = min(_MOST_COLUMNS, triton.next_power_of_2(width))
    _pieces_kernel[(num_places, triton.cdiv(width, columns))](
        rows, ordered, places, out, heads, tails, num_places, rows.stride(0), width, padding,
        WIDE=wide_type(grad), CHUNK=_CHUNK, ROWS=_ROWS, COLUMNS=columns,
    )  # fmt: skip
    # Few runs are long: those that are, are shared by columns among as many programs as can be.
    columns = min(columns, 128)
    _runs_kernel[(num_chunks, triton.cdiv(width, columns))](
        ordered, out, heads, tails, num_places, num_chunks, width, padding,
        WIDE=wide_type(grad), CHUNK=_CHUNK, ROWS=_TILE // columns, COLUMNS=columns,
    )  # fmt: skip
    return out


def _shape(indices: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    return weight.new_empty((*indices.shape, weight.shape[1]))


def _shape_backward(grad: torch.Tensor, indices: torch.Tensor, num_rows: int, padding_idx: int | None) -> torch.Tensor:
    return grad.new_empty((num_rows, grad.shape[-1]))


_forward = register(
    "embedding(Tensor indices, Tensor weight, int? padding_idx=None) -> Tensor", aten=_take, triton=_take, shapes=_shape
)
_backward = register(
    "embedding_backward(Tensor grad, Tensor indices, SymInt num_rows, int? padding_idx) -> Tensor",
    aten=_aten_backward,
    triton=_triton_backward,
    shapes=_shape_backward,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    indices, weight, ctx.padding_idx = inputs
    ctx.num_rows = weight.shape[0]
    ctx.save_for_backward(indices)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None]:
    return None, _backward(grad, *ctx.saved_tensors, ctx.num_rows, ctx.padding_idx), None


differentiable(_forward, save=_save, backward=_gradient)
differentiable_again(_backward, _plain_backward)
