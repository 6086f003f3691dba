"""Layer normalization over the last dim (Ba et al., 2016), alone and after the addition of a residual."""

from __future__ import annotations

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
    result: torch.Tensor = _forward(input, weight, bias, eps)
    return result


def add_layer_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: Maybe, bias: Maybe, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(sum, layer_norm(sum, weight, bias, eps))`` with ``sum = input + residual``, rounded to its dtype.

    Raises:
        ValueError: if the shapes of residual, weight or bias do not fit.
    """
    check_rows(input, residual=residual, weight=weight, bias=bias)
    total, normal = _add_forward(input, residual, weight, bias, eps)
    return total, normal


def _statistics(values: torch.Tensor, weight: Maybe, bias: Maybe, eps: float) -> tuple[torch.Tensor, ...]:
    """torch's own layer normalization of values in the dtype computed in: the result, and each row's mean and scale."""
    weight = None if weight is None else in_dtype(weight, values.dtype)
    bias = None if bias is None else in_dtype(bias, values.dtype)
    results: tuple[torch.Tensor, ...] = torch.native_layer_norm(values, values.shape[-1:], weight, bias, eps)
    return results


def _aten(input: torch.Tensor, weight: Maybe, bias: Maybe, eps: float) -> torch.Tensor:
    compute = promoted(input, weight, bias, least=torch.float32)
    out, *_ = _statistics(in_dtype(input.contiguous(), compute), weight, bias, eps)
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
    compute = promoted(grad, input, weight, least=torch.float32)
    values, grad = in_dtype(input.contiguous(), compute), in_dtype(grad.contiguous(), compute)
    weight_like, bias_like = (None if tensor is None else in_dtype(tensor, compute) for tensor in (weight, bias))
    _, mean, scale = _statistics(values, weight_like, bias_like, eps)
    grads = torch.ops.aten.native_layer_norm_backward(
        grad,
        values,
        values.shape[-1:],
        mean,
        scale,
        weight_like,
        bias_like,
        [wants_input, wants_weight, wants_bias],
    )
    if wants_input and grad_sum is not None:
        grads[0].add_(grad_sum)
    results = [
        input.new_empty(0) if one is None or like is None else in_dtype(one, like.dtype)
        for one, like in zip(grads, (input, weight, bias), strict=True)
    ]
    return results[0], results[1], results[2]


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
    wanted = Wanted(input=wants_input, weight=wants_weight, bias=wants_bias)
    return normalize_backward(Norm(eps, centered=True), wanted, grad, grad_sum, input, weight, bias)


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
        input.new_empty(0) if like is None or not wanted else like.new_empty(like.shape) for like, wanted in likes
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
    wants = ctx.needs_input_grad[:3]
    grads = _backward(grad, None, *ctx.saved_tensors, ctx.eps, *wants)
    return *wanted_grads(grads, wants), None


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
