"""Kernels over rows that are sorted by expert: the activation of a gated expert with its gradients, what puts a token's
rows together, and what clears rows of no expert. None makes a copy of rows in a wider type."""

from __future__ import annotations

from typing import Any

import torch

from runtime.kernels.activations import activation_and_slope
from runtime.kernels.elementwise import BLOCK, block_of
from runtime.kernels.language import tl, triton
from runtime.kernels.library import wide_dtype

#: Rows that one program clears.
_CLEARED_ROWS = 16


@triton.jit
def _gated(gate, up, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    """Value of a gated activation, and its slopes by gate and by up; what is not used is never computed."""
    if NAME == "clamped":
        # ``expert_activations.CLAMP`` and ``SHARPNESS``, written out: kernels may not read globals.
        low_gate = tl.where(gate > 7.0, 7.0, gate)
        low_up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        share = 1 / (1 + tl.exp(-1.702 * low_gate))
        by_up = low_gate * share
        value = (low_up + 1) * by_up
        by_gate = tl.where(gate > 7.0, 0.0, (low_up + 1) * share * (1 + 1.702 * low_gate * (1 - share)))
        by_up = tl.where(tl.abs(up) > 7.0, 0.0, by_up)
    else:
        by_up, slope = activation_and_slope(gate, NAME)
        value = by_up * up
        by_gate = slope * up
    return value, by_gate, by_up


@triton.jit
def _value_kernel(  # type: ignore[no-untyped-def]
    hidden_ptr, weight_ptr, by_value_ptr, value_ptr, product_ptr, width, STEP: tl.constexpr, NAME: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    up_place = width if STEP == 1 else 1
    product = tl.zeros([BLOCK], dtype=WIDE)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        exists = columns < width
        places = hidden_ptr + row * 2 * width + columns * STEP
        gate = tl.load(places, mask=exists, other=0.0).to(WIDE)
        up = tl.load(places + up_place, mask=exists, other=0.0).to(WIDE)
        value, _, _ = _gated(gate, up, NAME)
        if by_value_ptr is not None:
            product += value * tl.load(by_value_ptr + row * width + columns, mask=exists, other=0.0).to(WIDE)
        if weight_ptr is not None:
            value *= tl.load(weight_ptr + row).to(WIDE)
        tl.store(value_ptr + row * width + columns, value, mask=exists)
    if by_value_ptr is not None:
        tl.store(product_ptr + row, tl.sum(product, 0))


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    hidden_ptr, weight_ptr, by_value_ptr, by_hidden_ptr, width, STEP: tl.constexpr, NAME: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, columns, exists = block_of(width, BLOCK)
    up_place = width if STEP == 1 else 1
    places = row * 2 * width + columns * STEP
    gate = tl.load(hidden_ptr + places, mask=exists, other=0.0).to(WIDE)
    up = tl.load(hidden_ptr + places + up_place, mask=exists, other=0.0).to(WIDE)
    by_value = tl.load(by_value_ptr + row * width + columns, mask=exists, other=0.0).to(WIDE)
    if weight_ptr is not None:
        by_value *= tl.load(weight_ptr + row).to(WIDE)
    _, by_gate, by_up = _gated(gate, up, NAME)
    tl.store(by_hidden_ptr + places, by_value * by_gate, mask=exists)
    tl.store(by_hidden_ptr + places + up_place, by_value * by_up, mask=exists)


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, place_ptr, score_ptr, sum_ptr, width, K: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    token, columns, exists = block_of(width, BLOCK)
    total = tl.zeros([BLOCK], dtype=WIDE)
    for choice in range(K):
        row = tl.load(place_ptr + token * K + choice).to(tl.int64)
        value = tl.load(rows_ptr + row * width + columns, mask=exists & (row >= 0), other=0.0).to(WIDE)
        if score_ptr is not None:
            value *= tl.load(score_ptr + token * K + choice).to(WIDE)
        total += value
    tl.store(sum_ptr + token * width + columns, total, mask=exists)


@triton.jit
def _clear_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, end_ptr, num_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    first = tl.program_id(0) * ROWS
    end = tl.load(end_ptr)
    if first + ROWS > end:
        for row in range(tl.maximum(first, end), tl.minimum(first + ROWS, num_rows)):
            for start in range(0, width, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                zeros = tl.zeros([BLOCK], dtype=rows_ptr.dtype.element_ty)
                tl.store(rows_ptr + tl.cast(row, tl.int64) * width + columns, zeros, mask=columns < width)


def gated_values(
    hidden: torch.Tensor,
    *,
    name: str,
    interleaved: bool,
    weights: torch.Tensor | None = None,
    by_value: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Inner vectors of experts with a gate.

    Args:
        hidden: [R, 2F]: gates and ups one behind the other, or in turn (``interleaved``).
        name: of the activation of a gate, or "clamped".
        weights: [R]; each row is multiplied by its own.
        by_value: [R, F].

    Returns:
        [R, F] in the dtype of ``hidden``, weighed; and the inner product of each row, unweighed, with that of
        ``by_value``: [R] in at least float32.
    """
    count, width = len(hidden), hidden.shape[1] // 2
    value = hidden.new_empty((count, width))
    product = None if by_value is None else hidden.new_empty(count, dtype=wide_dtype(hidden))
    if count:
        _value_kernel[(count,)](
            hidden.contiguous(), weights, by_value, value, product, width,
            STEP=2 if interleaved else 1, NAME=name, WIDE=_wide(hidden, weights), BLOCK=_block(width),
        )  # fmt: skip
    return value, product


def gated_gradients(
    by_value: torch.Tensor, hidden: torch.Tensor, *, name: str, interleaved: bool, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """The gradient of ``hidden`` in ``gated_values``, [R, 2F]: ``by_value`` [R, F] is that of the weighed values."""
    count, width = by_value.shape
    result = hidden.new_empty(hidden.shape)
    if by_value.numel():
        _gradient_kernel[(count * triton.cdiv(width, BLOCK),)](
            hidden.contiguous(), weights, by_value.contiguous(), result, width,
            STEP=2 if interleaved else 1, NAME=name, WIDE=_wide(hidden, weights), BLOCK=BLOCK,
        )  # fmt: skip
    return result


def sums_of_choices(
    rows: torch.Tensor, order: torch.Tensor, scores: torch.Tensor | None, *, num_tokens: int
) -> torch.Tensor:
    """Each token's rows, weighed and added up in at least float32.

    Args:
        rows: [R, H], sorted; R ≤ T·k.
        order: the place of each sorted row among the tokens' choices, [T·k]; there are no rows for those behind R.
        scores: [T, k], or None for ones.

    Returns:
        [T, H] in the dtype of ``rows``.
    """
    width, k = rows.shape[1], len(order) // max(1, num_tokens)
    places = torch.full_like(order, -1)
    places[order[: len(rows)]] = torch.arange(len(rows), device=order.device, dtype=order.dtype)
    result = rows.new_empty((num_tokens, width))
    if result.numel():
        _sum_kernel[(num_tokens * triton.cdiv(width, BLOCK),)](
            rows.contiguous(), places, None if scores is None else scores.contiguous(), result, width,
            K=k, WIDE=_wide(rows, scores), BLOCK=BLOCK,
        )  # fmt: skip
    return result


def clear_rows_behind(rows: torch.Tensor, end: torch.Tensor) -> None:
    """Write zeros to rows of [R, N] (contiguous) from the one that ``end`` [1] says, which the host does not read."""
    if rows.numel():
        _clear_kernel[(triton.cdiv(len(rows), _CLEARED_ROWS),)](
            rows, end, len(rows), rows.shape[1], ROWS=_CLEARED_ROWS, BLOCK=_block(rows.shape[1])
        )


def _wide(*tensors: torch.Tensor | None) -> Any:
    return tl.float64 if any(one is not None and one.dtype == torch.float64 for one in tensors) else tl.float32


def _block(width: int) -> int:
    return min(BLOCK, 1 << max(width - 1, 0).bit_length())
