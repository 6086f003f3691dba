"""Rotary position embedding of query and key in one launch: see ``rotary``."""

from __future__ import annotations

from typing import Any

import torch

from runtime.kernels.library import differentiable, differentiable_again, promoted, register
from runtime.kernels.rotary import (
    aten_rotate,
    check,
    like,
    plain_backward,
    save,
    table_gradients,
    triton_rotate,
)
from runtime.kernels.rotary_kernels import Rotation

Pair = tuple[torch.Tensor, torch.Tensor]


def rotary_pair(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> Pair:
    """``rotary`` of two tensors by the same cos and sin; they may have different numbers of heads.

    Raises:
        ValueError: if the shapes do not fit.
    """
    check(query, cos, sin)
    check(key, cos, sin)
    results: Pair = _forward(query, key, cos, sin, interleaved)
    return results


def _aten(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> Pair:
    dtypes = [promoted(query, cos, sin), promoted(key, cos, sin)]
    query, key = aten_rotate([query, key], cos, sin, Rotation(interleaved), dtypes=dtypes)
    return query, key


def _triton(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> Pair:
    dtypes = [promoted(tensor, cos, sin) for tensor in (query, key)]
    query, key = triton_rotate([query, key], cos, sin, Rotation(interleaved), dtypes=dtypes)
    return query, key


def _shapes(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> Pair:
    query_dtype, key_dtype = (promoted(tensor, cos, sin) for tensor in (query, key))
    return like(query, query_dtype), like(key, key_dtype)


def _aten_backward(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    query_dtype: torch.dtype,
    key_dtype: torch.dtype,
) -> Pair:
    back = Rotation(interleaved, transposed=True)
    query, key = aten_rotate([grad_query, grad_key], cos, sin, back, dtypes=[query_dtype, key_dtype])
    return query, key


def _triton_backward(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    query_dtype: torch.dtype,
    key_dtype: torch.dtype,
) -> Pair:
    back = Rotation(interleaved, transposed=True)
    query, key = triton_rotate([grad_query, grad_key], cos, sin, back, dtypes=[query_dtype, key_dtype])
    return query, key


def _shapes_backward(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    query_dtype: torch.dtype,
    key_dtype: torch.dtype,
) -> Pair:
    return like(grad_query, query_dtype), like(grad_key, key_dtype)


def _plain_backward(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    query_dtype: torch.dtype,
    key_dtype: torch.dtype,
) -> Pair:
    query = plain_backward(grad_query, cos, sin, interleaved, query_dtype)
    return query, plain_backward(grad_key, cos, sin, interleaved, key_dtype)


_forward = register(
    "rotary_pair(Tensor query, Tensor key, Tensor cos, Tensor sin, bool interleaved=False) -> (Tensor, Tensor)",
    aten=_aten,
    triton=_triton,
    shapes=_shapes,
)
_backward = register(
    "rotary_pair_backward(Tensor grad_query, Tensor grad_key, Tensor cos, Tensor sin, bool interleaved, "
    "ScalarType query_dtype, ScalarType key_dtype) -> (Tensor, Tensor)",
    aten=_aten_backward,
    triton=_triton_backward,
    shapes=_shapes_backward,
)


def _gradient(
    ctx: Any, grad_query: torch.Tensor, grad_key: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None]:
    cos, sin = ctx.saved_tensors[:2]
    back: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if any(ctx.needs_input_grad[:2]):
        back = _backward(grad_query, grad_key, cos, sin, ctx.interleaved, *ctx.dtypes)
    return *back, *table_gradients(ctx, grad_query, grad_key), None


differentiable(_forward, save=save, backward=_gradient)
differentiable_again(_backward, _plain_backward)
