"""RMS normalization over the last dim (Zhang and Sennrich, 2019), alone and after the addition of a residual."""

from __future__ import annotations

import functools
from typing import Any

import torch

from runtime.kernels.library import (
    differentiable,
    differentiable_again,
    gradients_of,
    in_dtype,
    promoted,
    register,
)
from runtime.kernels.normalization import (
    Maybe,
    Norm,
    Wanted,
    addends_grads,
    check_rows,
    normalize,
    normalize_backward,
    sum_of,
    wanted_grads,
)
from runtime.kernels.rows import row_blocks


def rms_norm(input: torch.Tensor, weight: Maybe, eps: float, offset: float = 0.0) -> torch.Tensor:
    """``input · rsqrt(mean(input², -1) + eps) · (weight + offset)``, rounded once.

    Args:
        weight: ``[width]``, with ``width`` that of the last dim; None for ones.
        offset: 1 where weights are stored as their difference from one (Gemma).

    Returns:
        Of the dtype that input and weight promote to.

    Raises:
        ValueError: if the weight's shape does not fit.
    """
    check_rows(input, weight=weight)
    result: torch.Tensor = _forward(input, weight, eps, offset)
    return result


def add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: Maybe, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(sum, rms_norm(sum, weight, eps, offset))`` with ``sum = input + residual``, rounded to its dtype.

    Raises:
        ValueError: if the shapes of residual or weight do not fit.
    """
    check_rows(input, residual=residual, weight=weight)
    total, normal = _add_forward(input, residual, weight, eps, offset)
    return total, normal


def _normalized(values: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``values · scale`` and ``scale = rsqrt(mean(values², -1) + eps)``, of values in the dtype computed in."""
    squares = torch.square(values)
    total = squares.sum(-1, keepdim=True)
    scale = torch.add(
        _as_tensor(eps, values.dtype, values.device), total, alpha=1.0 / max(1, values.shape[-1])
    ).rsqrt_()
    return torch.mul(values, scale, out=squares), scale


@functools.cache
def _as_tensor(number: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A scalar that is made once: torch takes longer to make one of a number than to add two small tensors."""
    return torch.tensor(number, dtype=dtype, device=device)


def _factor_of(weight: torch.Tensor, offset: float, compute: torch.dtype) -> torch.Tensor:
    """``weight + offset`` in the dtype computed in."""
    factor = in_dtype(weight, compute)
    return factor + offset if offset else factor


def _aten(input: torch.Tensor, weight: Maybe, eps: float, offset: float = 0.0) -> torch.Tensor:
    compute = promoted(input, weight, least=torch.float32)
    normal, _ = _normalized(in_dtype(input.contiguous(), compute), eps)
    if weight is not None:
        normal.mul_(_factor_of(weight, offset, compute))
    return in_dtype(normal, promoted(input, weight))


def _aten_add(
    input: torch.Tensor, residual: torch.Tensor, weight: Maybe, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    total = input.contiguous() + residual.contiguous()
    return total, _aten(total, weight, eps, offset)


def _aten_backward(
    grad: torch.Tensor,
    grad_sum: Maybe,
    input: torch.Tensor,
    weight: Maybe,
    eps: float,
    offset: float,
    wants_input: bool,
    wants_weight: bool,
) -> tuple[torch.Tensor, ...]:
    compute = promoted(grad, input, weight, least=torch.float32)
    factor = None if weight is None else _factor_of(weight, offset, compute)
    grad_input = input.new_empty(input.shape) if wants_input else None
    shares = []
    for block, change, change_of_sum, result in row_blocks(input, grad, grad_sum, grad_input):
        change = in_dtype(change, compute)
        normal, scale = _normalized(in_dtype(block, compute), eps)
        product = change * normal
        if wants_weight:
            shares.append(product.sum(0))
        if result is None:
            continue
        if factor is not None:
            product.mul_(factor)
            change = change * factor
        total = product.sum(-1, keepdim=True)
        change = torch.addcmul(change, normal, total, value=-1.0 / max(1, input.shape[-1]), out=product)
        if change_of_sum is None:
            torch.mul(change, scale, out=result)
        else:
            torch.addcmul(change_of_sum, change, scale, out=result)
    grad_weight = None
    if weight is not None and wants_weight:
        grad_weight = _sum_of(shares, weight)
    return tuple(input.new_empty(0) if one is None else one for one in (grad_input, grad_weight))


def _sum_of(shares: list[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    """The gradient of the weight from those of some rows each."""
    if not shares:
        return torch.zeros_like(weight)
    return in_dtype(shares[0] if len(shares) == 1 else torch.stack(shares).sum(0), weight.dtype)


def _plain_backward(
    grad: torch.Tensor,
    grad_sum: Maybe,
    input: torch.Tensor,
    weight: Maybe,
    eps: float,
    offset: float,
    wants_input: bool,
    wants_weight: bool,
) -> tuple[Maybe, ...]:
    compute = promoted(grad, input, weight, least=torch.float32)

    def definition(input: torch.Tensor, weight: Maybe) -> torch.Tensor:
        values = input.to(compute)
        normal = values * (values.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (normal if weight is None else normal * _factor_of(weight, offset, compute)).to(grad.dtype)

    grad_input, grad_weight = gradients_of(definition, (input, weight), grad)
    return wanted_grads((sum_of(grad_input, grad_sum), grad_weight), (wants_input, wants_weight))


def _triton(input: torch.Tensor, weight: Maybe, eps: float, offset: float = 0.0) -> torch.Tensor:
    return normalize(Norm(eps, offset), input, None, weight, None)[0]


def _triton_add(
    input: torch.Tensor, residual: torch.Tensor, weight: Maybe, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, ...]:
    return normalize(Norm(eps, offset), input, residual, weight, None)


def _triton_backward(
    grad: torch.Tensor,
    grad_sum: Maybe,
    input: torch.Tensor,
    weight: Maybe,
    eps: float,
    offset: float,
    wants_input: bool,
    wants_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = Wanted(input=wants_input, weight=wants_weight)
    grad_input, grad_weight, _ = normalize_backward(Norm(eps, offset), wanted, grad, grad_sum, input, weight, None)
    return grad_input, grad_weight


def _shape(input: torch.Tensor, weight: Maybe, eps: float, offset: float = 0.0) -> torch.Tensor:
    return input.new_empty(input.shape, dtype=promoted(input, weight))


def _shapes_add(
    input: torch.Tensor, residual: torch.Tensor, weight: Maybe, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    total = input.new_empty(input.shape, dtype=promoted(input, residual))
    return total, _shape(total, weight, eps, offset)


def _shapes_backward(
    grad: torch.Tensor,
    grad_sum: Maybe,
    input: torch.Tensor,
    weight: Maybe,
    eps: float,
    offset: float,
    wants_input: bool,
    wants_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_weight = input.new_empty(0) if weight is None or not wants_weight else weight.new_empty(weight.shape)
    return input.new_empty(input.shape if wants_input else 0), grad_weight


_forward = register(
    "rms_norm(Tensor input, Tensor? weight, float eps, float offset=0.0) -> Tensor",
    aten=_aten,
    triton=_triton,
    shapes=_shape,
)
_add_forward = register(
    "add_rms_norm(Tensor input, Tensor residual, Tensor? weight, float eps, float offset=0.0) -> (Tensor, Tensor)",
    aten=_aten_add,
    triton=_triton_add,
    shapes=_shapes_add,
)
_backward = register(
    "rms_norm_backward(Tensor grad, Tensor? grad_sum, Tensor input, Tensor? weight, float eps, float offset, "
    "bool wants_input, bool wants_weight) -> (Tensor, Tensor)",
    aten=_aten_backward,
    triton=_triton_backward,
    shapes=_shapes_backward,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, weight, *ctx.constants = inputs
    ctx.save_for_backward(input, weight)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[Maybe, ...]:
    wants_input, wants_weight, *_ = ctx.needs_input_grad
    grads = _backward(grad, None, *ctx.saved_tensors, *ctx.constants, wants_input, wants_weight)
    return *wanted_grads(grads, (wants_input, wants_weight)), None, None


def _save_add(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    input, residual, weight, *ctx.constants = inputs
    ctx.dtypes = input.dtype, residual.dtype
    ctx.save_for_backward(output[0], weight)
    ctx.set_materialize_grads(False)


def _gradient_add(ctx: Any, grad_sum: Maybe, grad: Maybe) -> tuple[Maybe, ...]:
    wants_input, wants_residual, wants_weight, *_ = ctx.needs_input_grad
    grad_total, grad_weight = grad_sum, None
    if grad is not None:
        wants = wants_input or wants_residual, wants_weight
        grads = _backward(grad, grad_sum, *ctx.saved_tensors, *ctx.constants, *wants)
        grad_total, grad_weight = wanted_grads(grads, wants)
    return *addends_grads(grad_total, ctx.dtypes, (wants_input, wants_residual)), grad_weight, None, None


differentiable(_forward, save=_save, backward=_gradient)
differentiable(_add_forward, save=_save_add, backward=_gradient_add)
differentiable_again(_backward, _plain_backward)
