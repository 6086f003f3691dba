"""GELU of a sum with a bias, ``gelu(input + bias)`` (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016).

The sum is neither rounded nor kept: backward adds again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from runtime.kernels.activations import (
    PLAIN,
    activate,
    activation_and_slope,
    activation_gradient,
    gelu_name,
    is_one_operator,
)
from runtime.kernels.elementwise import BLOCK, block_of, same_rows, wide_type
from runtime.kernels.language import tl, triton
from runtime.kernels.library import (
    WIDE,
    differentiable,
    differentiable_again,
    gradients_of,
    in_dtype,
    is_torchs_own,
    promoted,
    register,
    wide_dtype,
)

#: Backward: columns that a program handles, and rows that it takes at a time.
_COLUMNS, _ROWS = 128, 16
#: Backward: at most so many programs share a column, each leaving one sum for its gradient of the bias.
_MOST_SHARES = 256


def bias_gelu(input: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """``gelu(input + bias)``, rounded once to the type to which the two promote.

    Args:
        input: ``[..., width]``.
        bias: ``[width]``.
        approximate: ``"none"`` or ``"tanh"``, as in ``F.gelu``.

    Raises:
        ValueError: if the bias is not as long as a row, or for another ``approximate``.
    """
    if bias.dim() != 1 or not input.dim() or bias.shape[0] != input.shape[-1]:
        raise ValueError(
            f"bias is {tuple(bias.shape)} and the input {tuple(input.shape)}: expected a bias of the input's last dim"
        )
    gelu_name(approximate)
    if is_one_operator(approximate, input.numel()) and is_torchs_own(input, bias):
        return F.gelu((input + bias).contiguous(), approximate=approximate)
    result: torch.Tensor = _forward(input, bias, approximate)
    return result


def _sum(input: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    if input.dtype in WIDE and bias.dtype is input.dtype:
        return (input + bias).contiguous()
    dtype = wide_dtype(input, bias)
    if input.is_contiguous():
        return torch.add(in_dtype(input, dtype), in_dtype(bias, dtype))
    out = input.new_empty(input.shape, dtype=dtype)
    return torch.add(in_dtype(input, dtype), in_dtype(bias, dtype), out=out)


def _aten(input: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    total = _sum(input, bias)
    activate(total, gelu_name(approximate), out=total)
    return total if total.dtype is input.dtype else in_dtype(total, promoted(input, bias))


def _aten_backward(
    grad: torch.Tensor, input: torch.Tensor, bias: torch.Tensor, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    total = _sum(input, bias)
    activation_gradient(in_dtype(grad, total.dtype), total, gelu_name(approximate), out=total)
    if total.dim() == 1:
        return in_dtype(total, input.dtype), total.to(bias.dtype, copy=True)
    return in_dtype(total, input.dtype), in_dtype(total.flatten(0, -2).sum(0), bias.dtype)


def _plain_backward(
    grad: torch.Tensor, input: torch.Tensor, bias: torch.Tensor, approximate: str
) -> tuple[torch.Tensor | None, ...]:
    def definition(input: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        dtype = wide_dtype(input, bias)
        return PLAIN[gelu_name(approximate)](input.to(dtype) + bias.to(dtype)).to(grad.dtype)

    return gradients_of(definition, (input, bias), grad)


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    input_ptr, bias_ptr, out_ptr, input_stride, width, NAME: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    row, columns, exists = block_of(width, BLOCK)
    x = tl.load(input_ptr + row * input_stride + columns, mask=exists, other=0.0).to(WIDE)
    x += tl.load(bias_ptr + columns, mask=exists, other=0.0).to(WIDE)
    value, _ = activation_and_slope(x, NAME)
    tl.store(out_ptr + row * width + columns, value, mask=exists)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, input_ptr, bias_ptr, grad_input_ptr, sums_ptr, grad_stride, input_stride, num_rows, rows_each, width,
    NAME: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The input's gradient in some columns of some rows, and its sum over these rows."""
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    within = columns < width
    bias = tl.load(bias_ptr + columns, mask=within, other=0.0).to(WIDE)
    share = tl.program_id(1).to(tl.int64)
    first, last = share * rows_each, tl.minimum((share + 1) * rows_each, num_rows)
    total = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
    for start in range(first, last, ROWS):
        rows = (start + tl.arange(0, ROWS))[:, None]
        exists = (rows < last) & within[None, :]
        x = tl.load(input_ptr + rows * input_stride + columns[None, :], mask=exists, other=0.0).to(WIDE)
        grad = tl.load(grad_ptr + rows * grad_stride + columns[None, :], mask=exists, other=0.0).to(WIDE)
        _, slope = activation_and_slope(x + bias[None, :], NAME)
        grad *= slope
        tl.store(grad_input_ptr + rows * width + columns[None, :], grad, mask=exists)
        total += grad
    tl.store(sums_ptr + share * width + columns, tl.sum(total, axis=0), mask=within)


def _triton(input: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    out = _shape(input, bias)
    if out.numel():
        rows = same_rows(input, whole=False)
        _kernel[rows.grid](
            rows.tensors[0], bias.contiguous(), out, rows.strides[0], rows.width,
            NAME=gelu_name(approximate), WIDE=wide_type(out), BLOCK=BLOCK,
        )  # fmt: skip
    return out


def _triton_backward(
    grad: torch.Tensor, input: torch.Tensor, bias: torch.Tensor, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_input = input.new_empty(input.shape)
    if not input.numel():
        return grad_input, torch.zeros_like(bias)
    (grad_rows, rows), (grad_stride, stride), width, _ = same_rows(grad, input, whole=False)
    num_rows = rows.shape[0]
    rows_each = triton.cdiv(triton.cdiv(num_rows, _MOST_SHARES), _ROWS) * _ROWS
    shares = triton.cdiv(num_rows, rows_each)
    sums = input.new_empty((shares, width), dtype=wide_dtype(input, bias))
    _backward_kernel[(triton.cdiv(width, _COLUMNS), shares)](
        grad_rows, rows, bias.contiguous(), grad_input, sums, grad_stride, stride, num_rows, rows_each, width,
        NAME=gelu_name(approximate), WIDE=wide_type(sums), ROWS=_ROWS, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return grad_input, sums.sum(0).to(bias.dtype)


def _shape(input: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return input.new_empty(input.shape, dtype=torch.promote_types(input.dtype, bias.dtype))


def _shapes_backward(
    grad: torch.Tensor, input: torch.Tensor, bias: torch.Tensor, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return input.new_empty(input.shape), bias.new_empty(bias.shape)


_forward = register(
    'bias_gelu(Tensor input, Tensor bias, str approximate="none") -> Tensor', aten=_aten, triton=_triton, shapes=_shape
)
_backward = register(
    "bias_gelu_backward(Tensor grad, Tensor input, Tensor bias, str approximate) -> (Tensor, Tensor)",
    aten=_aten_backward,
    triton=_triton_backward,
    shapes=_shapes_backward,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, bias, ctx.approximate = inputs
    ctx.save_for_backward(input, bias)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    return *_backward(grad, *ctx.saved_tensors, ctx.approximate), None


differentiable(_forward, save=_save, backward=_gradient)
differentiable_again(_backward, _plain_backward)
