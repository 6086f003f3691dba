"""The Triton kernels of RMS and layer normalization; ``normalization`` launches them and states what they compute.

In all of them a tensor is ``[num_rows, width]``, contiguous. Pointers that are None stand for what is not given or not
wanted. ``CENTERED`` is layer normalization, ``WIDE`` the type computed in, ``STORED`` that of the sum of input and
residual.
"""

from __future__ import annotations

from runtime.kernels.language import tl, triton


@triton.jit
def _values(input_ptr, residual_ptr, offsets, exists, STORED: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is normalized: the input, or its sum with the residual as that is stored."""
    values = tl.load(input_ptr + offsets, mask=exists, other=0.0).to(WIDE)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + offsets, mask=exists, other=0.0).to(WIDE)
        values = (values + residual).to(STORED).to(WIDE)
    return values


@triton.jit
def _affine(normal, weight_ptr, bias_ptr, columns, width, OFFSET: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """``normal · (weight + offset) + bias``."""
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(WIDE)
        normal = normal * (weight + OFFSET)[None, :]
    if bias_ptr is not None:
        normal += tl.load(bias_ptr + columns, mask=columns < width, other=0.0).to(WIDE)[None, :]
    return normal


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    input_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    out_ptr,
    num_rows,
    width,
    CENTERED: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    STORED: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program normalizes ``ROWS`` whole rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    exists = (rows < num_rows)[:, None] & (columns < width)[None, :]
    offsets = rows[:, None] * width + columns[None, :]
    values = _values(input_ptr, residual_ptr, offsets, exists, STORED, WIDE)
    if sum_ptr is not None:
        tl.store(sum_ptr + offsets, values, mask=exists)
    if CENTERED:
        values = tl.where(exists, values - (tl.sum(values, 1) / width)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(values * values, 1) / width + EPS)
    normal = values * scale[:, None]
    tl.store(out_ptr + offsets, _affine(normal, weight_ptr, bias_ptr, columns, width, OFFSET, WIDE), mask=exists)


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    grad_sum_ptr,
    input_ptr,
    weight_ptr,
    grad_input_ptr,
    partial_weight_ptr,
    partial_bias_ptr,
    num_rows,
    width,
    CENTERED: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEEPS_FACTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program walks through the rows, ``ROWS`` at a time, and sums its share of the weight's and bias's gradients.

    Without ``KEEPS_FACTOR`` the weight is read again for each tile, to need fewer registers. With ``STAGES`` of 2 the
    next rows are read while these are worked on.
    """
    columns = tl.arange(0, COLUMNS)
    weight_total = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
    bias_total = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
    if weight_ptr is not None and KEEPS_FACTOR:
        factor = (tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(WIDE) + OFFSET)[None, :]
    for start in tl.range(tl.program_id(0).to(tl.int64) * ROWS, num_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        exists = (rows < num_rows)[:, None] & (columns < width)[None, :]
        offsets = rows[:, None] * width + columns[None, :]
        values = tl.load(input_ptr + offsets, mask=exists, other=0.0).to(WIDE)
        grad = tl.load(grad_ptr + offsets, mask=exists, other=0.0).to(WIDE)
        if CENTERED:
            values = tl.where(exists, values - (tl.sum(values, 1) / width)[:, None], 0.0)
        # Rows past the last are all zeros, whose scale may be infinite.
        scale = tl.where(rows < num_rows, tl.rsqrt(tl.sum(values * values, 1) / width + EPS), 0.0)
        normal = values * scale[:, None]
        if partial_weight_ptr is not None:
            weight_total += grad * normal
        if partial_bias_ptr is not None:
            bias_total += grad
        if grad_input_ptr is not None:
            if not KEEPS_FACTOR:
                grad = _affine(grad, weight_ptr, None, columns, width, OFFSET, WIDE)
            elif weight_ptr is not None:
                grad *= factor
            change = grad - normal * (tl.sum(grad * normal, 1) / width)[:, None]
            if CENTERED:
                change -= (tl.sum(grad, 1) / width)[:, None]
            change *= scale[:, None]
            if grad_sum_ptr is not None:
                change += tl.load(grad_sum_ptr + offsets, mask=exists, other=0.0).to(WIDE)
            tl.store(grad_input_ptr + offsets, change, mask=exists)
    share = tl.program_id(0).to(tl.int64) * width + columns
    if partial_weight_ptr is not None:
        tl.store(partial_weight_ptr + share, tl.sum(weight_total, 0), mask=columns < width)
    if partial_bias_ptr is not None:
        tl.store(partial_bias_ptr + share, tl.sum(bias_total, 0), mask=columns < width)


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]
    input_ptr,
    residual_ptr,
    start,
    width,
    CENTERED: tl.constexpr,
    EPS: tl.constexpr,
    STORED: tl.constexpr,
    WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Mean (zero unless ``CENTERED``) and scale of the row that begins at ``start``."""
    total = tl.zeros([COLUMNS], dtype=WIDE)
    if CENTERED:
        for first in range(0, width, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            total += _values(input_ptr, residual_ptr, start + columns, columns < width, STORED, WIDE)
    mean = tl.sum(total, 0) / width
    squares = tl.zeros([COLUMNS], dtype=WIDE)
    for first in range(0, width, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        values = _values(input_ptr, residual_ptr, start + columns, columns < width, STORED, WIDE) - mean
        squares += tl.where(columns < width, values * values, 0.0)
    return mean, tl.rsqrt(tl.sum(squares, 0) / width + EPS)


@triton.jit
def wide_forward_kernel(  # type: ignore[no-untyped-def]
    input_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    out_ptr,
    num_rows,
    width,
    CENTERED: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    STORED: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program normalizes one row, ``COLUMNS`` at a time, adding the residual again in each pass."""
    start = tl.program_id(0).to(tl.int64) * width
    mean, scale = _statistics(input_ptr, residual_ptr, start, width, CENTERED, EPS, STORED, WIDE, COLUMNS)
    for first in range(0, width, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        exists = (columns < width)[None, :]
        offsets = (start + columns)[None, :]
        values = _values(input_ptr, residual_ptr, offsets, exists, STORED, WIDE)
        if sum_ptr is not None:
            tl.store(sum_ptr + offsets, values, mask=exists)
        normal = (values - mean) * scale
        tl.store(out_ptr + offsets, _affine(normal, weight_ptr, bias_ptr, columns, width, OFFSET, WIDE), mask=exists)


@triton.jit
def wide_backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    grad_sum_ptr,
    input_ptr,
    weight_ptr,
    grad_input_ptr,
    mean_ptr,
    scale_ptr,
    num_rows,
    width,
    CENTERED: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program gives the gradient of one row, ``COLUMNS`` at a time, and keeps that row's mean and scale."""
    row = tl.program_id(0).to(tl.int64)
    start = row * width
    mean, scale = _statistics(input_ptr, None, start, width, CENTERED, EPS, WIDE, WIDE, COLUMNS)
    tl.store(mean_ptr + row, mean)
    tl.store(scale_ptr + row, scale)
    if grad_input_ptr is not None:
        along = tl.zeros([1, COLUMNS], dtype=WIDE)
        total = tl.zeros([1, COLUMNS], dtype=WIDE)
        for first in range(0, width, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            exists = (columns < width)[None, :]
            offsets = (start + columns)[None, :]
            normal = (tl.load(input_ptr + offsets, mask=exists, other=0.0).to(WIDE) - mean) * scale
            grad = tl.load(grad_ptr + offsets, mask=exists, other=0.0).to(WIDE)
            grad = _affine(grad, weight_ptr, None, columns, width, OFFSET, WIDE)
            along += grad * normal
            total += grad
        mean_along = tl.sum(tl.sum(along, 1), 0) / width
        mean_grad = tl.sum(tl.sum(total, 1), 0) / width
        for first in range(0, width, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            exists = (columns < width)[None, :]
            offsets = (start + columns)[None, :]
            normal = (tl.load(input_ptr + offsets, mask=exists, other=0.0).to(WIDE) - mean) * scale
            grad = tl.load(grad_ptr + offsets, mask=exists, other=0.0).to(WIDE)
            change = _affine(grad, weight_ptr, None, columns, width, OFFSET, WIDE) - normal * mean_along
            if CENTERED:
                change -= mean_grad
            change *= scale
            if grad_sum_ptr is not None:
                change += tl.load(grad_sum_ptr + offsets, mask=exists, other=0.0).to(WIDE)
            tl.store(grad_input_ptr + offsets, change, mask=exists)


@triton.jit
def wide_parameters_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    input_ptr,
    mean_ptr,
    scale_ptr,
    partial_weight_ptr,
    partial_bias_ptr,
    num_rows,
    width,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program walks down ``COLUMNS`` columns and sums its share of the weight's and bias's gradients."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    weight_total = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
    bias_total = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
    for start in range(tl.program_id(1).to(tl.int64) * ROWS, num_rows, tl.num_programs(1) * ROWS):
        rows = start + tl.arange(0, ROWS)
        exists = (rows < num_rows)[:, None] & (columns < width)[None, :]
        offsets = rows[:, None] * width + columns[None, :]
        grad = tl.load(grad_ptr + offsets, mask=exists, other=0.0).to(WIDE)
        if partial_weight_ptr is not None:
            mean = tl.load(mean_ptr + rows, mask=rows < num_rows, other=0.0)
            scale = tl.load(scale_ptr + rows, mask=rows < num_rows, other=0.0)
            values = tl.load(input_ptr + offsets, mask=exists, other=0.0).to(WIDE)
            weight_total += grad * (values - mean[:, None]) * scale[:, None]
        if partial_bias_ptr is not None:
            bias_total += grad
    share = tl.program_id(1).to(tl.int64) * width + columns
    if partial_weight_ptr is not None:
        tl.store(partial_weight_ptr + share, tl.sum(weight_total, 0), mask=columns < width)
    if partial_bias_ptr is not None:
        tl.store(partial_bias_ptr + share, tl.sum(bias_total, 0), mask=columns < width)
