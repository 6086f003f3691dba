"""Layer normalization over the last dim (Ba et al., 2016), alone and after the addition of a residual."""

from __future__ import annotations

from typing import Any

import torch

from runtime.kernels.library import (
    WIDE,
    differentiable,
    differentiable_again,
    gradients_of,
    in_dtype,
    is_torchs_on_gpu,
    is_torchs_own,
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

_native_backward: Any = torch.ops.aten.native_layer_norm_backward.default


def layer_norm(input: torch.Tensor, weight: Maybe, bias: Maybe, eps: float) -> torch.Tensor:
    """``(input - mean) · rsqrt(variance + eps) · weight + bias`` of every row, rounded once.

    Args:
        weight, bias: ``[width]``, with ``width`` that of the last dim; None for ones, and for zeros.

    Returns:
        Of the dtype that all the tensors promote to.

    Raises:
        ValueError: if the shapes of weight or bias do not fit.
    """
    check_rows(input, weight=weight, bias=bias)
    if is_torchs_on_gpu(input, weight, bias):
        return torch.layer_norm(input.contiguous(), input.shape[-1:], weight, bias, eps)
    run = _aten if is_torchs_own(input, weight, bias) else _forward
    result: torch.Tensor = run(input, weight, bias, eps)
    return result


def add_layer_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: Maybe, bias: Maybe, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(sum, layer_norm(sum, weight, bias, eps))`` with ``sum = input + residual``, rounded to its dtype.

    Raises:
        ValueError: if the shapes of residual, weight or bias do not fit.
    """
    check_rows(input, residual=residual, weight=weight, bias=bias)
    if is_torchs_on_gpu(input, residual, weight, bias):
        total = input.contiguous() + residual.contiguous()
        return total, torch.layer_norm(total, total.shape[-1:], weight, bias, eps)
    run = _aten_add if is_torchs_own(input, residual, weight, bias) else _add_forward
    total, normal = run(input, residual, weight, bias, eps)
    return total, normal


def _are_alike(input: torch.Tensor, weight: Maybe, bias: Maybe) -> bool:
    dtype = input.dtype
    return (weight is None or weight.dtype is dtype) and (bias is None or bias.dtype is dtype)


def _aten(input: torch.Tensor, weight: Maybe, bias: Maybe, eps: float) -> torch.Tensor:
    if input.dtype in WIDE and _are_alike(input, weight, bias):
        return torch.layer_norm(input.contiguous(), input.shape[-1:], weight, bias, eps)
    compute = promoted(input, weight, bias, least=torch.float32)
    weight_like = None if weight is None else in_dtype(weight, compute)
    bias_like = None if bias is None else in_dtype(bias, compute)
    out = torch.layer_norm(in_dtype(input.contiguous(), compute), input.shape[-1:], weight_like, bias_like, eps)
    return in_dtype(out, promoted(input, weight, bias))


def _aten_add(
    input: torch.Tensor, residual: torch.Tensor, weight: Maybe, bias: Maybe, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = input.contiguous() + residual.contiguous()
    return total, _aten(total, weight, bias, eps)


def _aten_backward(
    grad: torch.Tensor,
    grad_sum: Maybe,
    input: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    eps: float,
    wants_input: bool,
    wants_weight: bool,
    wants_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, grad, weight_like, bias_like = input.contiguous(), grad.contiguous(), weight, bias
    simple = input.dtype in WIDE and grad.dtype is input.dtype and _are_alike(input, weight, bias)
    if not simple:
        compute = promoted(grad, input, weight, least=torch.float32)
        values, grad = in_dtype(values, compute), in_dtype(grad, compute)
        weight_like = None if weight is None else in_dtype(weight, compute)
        bias_like = None if bias is None else in_dtype(bias, compute)
    shape = values.shape[-1:]
    _, mean, scale = torch.native_layer_norm(values, shape, None, None, eps)
    wants = [wants_input, wants_weight, wants_bias]
    by_input, by_weight, by_bias = _native_backward(grad, values, shape, mean, scale, weight_like, bias_like, wants)
    if wants_input and grad_sum is not None:
        by_input.add_(grad_sum)
    if not simple:
        by_input, by_weight, by_bias = (
            one if one is None or like is None else in_dtype(one, like.dtype)
            for one, like in ((by_input, input), (by_weight, weight), (by_bias, bias))
        )
    return (
        input.new_empty(0) if by_input is None else by_input,
        input.new_empty(0) if by_weight is None else by_weight,
        input.new_empty(0) if by_bias is None else by_bias,
    )


def _plain_backward(
    grad: torch.Tensor,
    grad_sum: Maybe,
    input: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    eps: float,
    *wants: bool,
) -> tuple[Maybe, ...]:
    compute = promoted(grad, input, weight, least=torch.float32)

    def definition(input: torch.Tensor, weight: Maybe, bias: Maybe) -> torch.Tensor:
        values = input.to(compute)
        centred = values - values.mean(-1, keepdim=True)
        normal = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
        normal = normal if weight is None else normal * weight.to(compute)
        return (normal if bias is None else normal + bias.to(compute)).to(grad.dtype)

    grad_input, *others = gradients_of(definition, (input, weight, bias), grad)
    return wanted_grads((sum_of(grad_input, grad_sum), *others), wants)


def _triton(input: torch.Tensor, weight: Maybe, bias: Maybe, eps: float) -> torch.Tensor:
    return normalize(Norm(eps, centered=True), input, None, weight, bias)[0]


def _triton_add(
    input: torch.Tensor, residual: torch.Tensor, weight: Maybe, bias: Maybe, eps: float
) -> tuple[torch.Tensor, ...]:
    return normalize(Norm(eps, centered=True), input, residual, weight, bias)


def _triton_backward(
    grad: torch.Tensor,
    grad_sum: Maybe,
    input: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    eps: float,
    wants_input: bool,
    wants_weight: bool,
    wants_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    requested = RequestedGradients(input=wants_input, weight=wants_weight, bias=wants_bias)
    return normalize_backward(Norm(eps, centered=True), requested, grad, grad_sum, input, weight, bias)


def _shape(input: torch.Tensor, weight: Maybe, bias: Maybe, eps: float) -> torch.Tensor:
    return input.new_empty(input.shape, dtype=promoted(input, weight, bias))


def _shapes_add(
    input: torch.Tensor, residual: torch.Tensor, weight: Maybe, bias: Maybe, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = input.new_empty(input.shape, dtype=promoted(input, residual))
    return total, _shape(total, weight, bias, eps)


def _shapes_backward(
    grad: torch.Tensor,
    grad_sum: Maybe,
    input: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    eps: float,
    wants_input: bool,
    wants_weight: bool,
    wants_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    likes = (input, wants_input), (weight, wants_weight), (bias, wants_bias)
    shapes = [
        input.new_empty(0) if like is None or not is_requested else like.new_empty(like.shape)
        for like, is_requested in likes
    ]
    return shapes[0], shapes[1], shapes[2]


_forward = register(
    "layer_norm(Tensor input, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    aten=_aten,
    triton=_triton,
    shapes=_shape,
)
_add_forward = register(
    "add_layer_norm(Tensor input, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
    aten=_aten_add,
    triton=_triton_add,
    shapes=_shapes_add,
)
_backward = register(
    "layer_norm_backward(Tensor grad, Tensor? grad_sum, Tensor input, Tensor? weight, Tensor? bias, float eps, "
    "bool wants_input, bool wants_weight, bool wants_bias) -> (Tensor, Tensor, Tensor)",
    aten=_aten_backward,
    triton=_triton_backward,
    shapes=_shapes_backward,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(input, weight, bias)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[Maybe, ...]:
    input, weight, bias = ctx.saved_tensors
    wants_input, wants_weight, wants_bias, _ = ctx.needs_input_grad
    grads = _backward(grad, None, input, weight, bias, ctx.eps, wants_input, wants_weight, wants_bias)
    by_input, by_weight, by_bias = grads
    return by_input if wants_input else None, by_weight if wants_weight else None, by_bias if wants_bias else None, None


def _save_add(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    input, residual, weight, bias, ctx.eps = inputs
    ctx.dtypes = input.dtype, residual.dtype
    ctx.save_for_backward(output[0], weight, bias)
    ctx.set_materialize_grads(False)


def _gradient_add(ctx: Any, grad_sum: Maybe, grad: Maybe) -> tuple[Maybe, ...]:
    wants_input, wants_residual, *wants_parameters = ctx.needs_input_grad[:4]
    grad_total, grad_weight, grad_bias = grad_sum, None, None
    if grad is not None:
        wants = wants_input or wants_residual, *wants_parameters
        grads = _backward(grad, grad_sum, *ctx.saved_tensors, ctx.eps, *wants)
        grad_total, grad_weight, grad_bias = wanted_grads(grads, wants)
    addends = addends_grads(grad_total, ctx.dtypes, (wants_input, wants_residual))
    return *addends, grad_weight, grad_bias, None


differentiable(_forward, save=_save, backward=_gradient)
differentiable(_add_forward, save=_save_add, backward=_gradient_add)
differentiable_again(_backward, _plain_backward)
