"""RMS normalization over the last dim (Zhang and Sennrich, 2019), alone and after the addition of a residual."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from runtime.kernels.library import (
    WIDE,
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
    RequestedGradients,
    addends_grads,
    check_rows,
    normalize,
    normalize_backward,
    sum_of,
    wanted_grads,
)
from runtime.kernels.rows import is_one_block, row_blocks


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


def _scale_of(values: torch.Tensor, eps: float) -> torch.Tensor:
    """``rsqrt(mean(values², -1) + eps)``, of values in the dtype computed in."""
    total = (values * values).sum(-1, keepdim=True)
    return torch.add(_as_tensor(eps, values.dtype, values.device), total, alpha=1.0 / max(1, values.shape[-1])).rsqrt_()


@functools.cache
def _as_tensor(number: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A scalar that is made once: torch takes longer to make one of a number than to add two small tensors."""
    return torch.tensor(number, dtype=dtype, device=device)


def _is_simple(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether there is one dtype, which need not be widened, and one block."""
    return weight.dtype is input.dtype and input.dtype in WIDE and is_one_block(input, input.numel())


def _factor_of(weight: torch.Tensor, offset: float, compute: torch.dtype) -> torch.Tensor:
    """``weight + offset`` in the dtype computed in."""
    factor = in_dtype(weight, compute)
    return factor + offset if offset else factor


def _aten(input: torch.Tensor, weight: Maybe, eps: float, offset: float = 0.0) -> torch.Tensor:
    if weight is not None and _is_simple(input, weight):
        values = input.contiguous()
        normal = values * _scale_of(values, eps)
        return normal.mul_(weight + offset if offset else weight)
    compute = promoted(input, weight, least=torch.float32)
    values = in_dtype(input.contiguous(), compute)
    normal = values * _scale_of(values, eps)
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
) -> tuple[Maybe, ...]:
    if weight is not None and wants_input and wants_weight and grad.dtype is input.dtype and _is_simple(input, weight):
        shifted = weight + offset if offset else weight
        return _rows_backward(input.contiguous(), grad.contiguous(), grad_sum, shifted, eps, True, True)
    compute = promoted(grad, input, weight, least=torch.float32)
    factor = None if weight is None else _factor_of(weight, offset, compute)
    grad_input = grad_weight = None
    shares = []
    if is_one_block(input, input.numel()):
        values, change = in_dtype(input.contiguous(), compute), in_dtype(grad.contiguous(), compute)
        changed, share = _rows_backward(values, change, grad_sum, factor, eps, wants_input, wants_weight)
        grad_input = None if changed is None else in_dtype(changed, input.dtype)
        shares.append(share)
    else:
        grad_input = input.new_empty(input.shape) if wants_input else None
        for block, change, change_of_sum, result in row_blocks(input, grad, grad_sum, grad_input):
            values, change = in_dtype(block, compute), in_dtype(change, compute)
            _, share = _rows_backward(values, change, change_of_sum, factor, eps, wants_input, wants_weight, out=result)
            shares.append(share)
    if weight is not None and wants_weight:
        grad_weight = _sum_of(shares, weight)
    return tuple(input.new_empty(0) if one is None else one for one in (grad_input, grad_weight))


def _rows_backward(
    values: torch.Tensor,
    change: torch.Tensor,
    change_of_sum: Maybe,
    factor: Maybe,
    eps: float,
    wants_input: bool,
    wants_weight: bool,
    *,
    out: Maybe = None,
) -> tuple[Maybe, Maybe]:
    """Gradients of some rows (written to ``out``, if there is one) and, summed over them, of the weight."""
    scale = _scale_of(values, eps)
    normal = values * scale
    product = change * normal
    share = None
    if wants_weight:
        share = product.flatten(0, -2).sum(0) if product.dim() > 1 else product.clone()
    if not wants_input:
        return None, share
    if factor is not None:
        product.mul_(factor)
        change = change * factor
    total = product.sum(-1, keepdim=True)
    changed = torch.addcmul(change, normal, total, value=-1.0 / max(1, values.shape[-1]))
    if change_of_sum is None:
        return torch.mul(changed, scale, out=changed if out is None else out), share
    return torch.addcmul(change_of_sum, changed, scale, out=out), share


def _sum_of(shares: Sequence[Maybe], weight: torch.Tensor) -> torch.Tensor:
    """The gradient of the weight from those of some rows each."""
    present = [share for share in shares if share is not None]
    if not present:
        return torch.zeros_like(weight)
    return in_dtype(present[0] if len(present) == 1 else torch.stack(present).sum(0), weight.dtype)


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
    requested = RequestedGradients(input=wants_input, weight=wants_weight)
    grad_input, grad_weight, _ = normalize_backward(Norm(eps, offset), requested, grad, grad_sum, input, weight, None)
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
    by_input, by_weight = _backward(grad, None, *ctx.saved_tensors, *ctx.constants, wants_input, wants_weight)
    return by_input if wants_input else None, by_weight if wants_weight else None, None, None


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
