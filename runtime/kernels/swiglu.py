"""SwiGLU, ``silu(gate) · up`` (Shazeer, "GLU Variants Improve Transformer", 2020); keeps nothing but its inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from runtime.kernels.elementwise import BLOCK, contiguous, grid_of, offsets_of, wide_type
from runtime.kernels.language import tl, triton
from runtime.kernels.library import differentiable, register, wide


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) · up`` of two tensors of one shape and dtype, rounded once."""
    result: torch.Tensor = _forward(gate, up)
    return result


def _aten(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (F.silu(wide(gate)) * wide(up)).to(gate.dtype)


def _aten_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grad, wide_gate = wide(grad), wide(gate)
    sigmoid = torch.sigmoid(wide_gate)
    silu = wide_gate * sigmoid
    slope = sigmoid + silu * (1 - sigmoid)
    return (grad * wide(up) * slope).to(gate.dtype), (grad * silu).to(up.dtype)


@triton.jit
def _kernel(gate_ptr, up_ptr, out_ptr, num_elements, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets, exists = offsets_of(num_elements, BLOCK)
    gate = tl.load(gate_ptr + offsets, mask=exists, other=0.0).to(WIDE)
    up = tl.load(up_ptr + offsets, mask=exists, other=0.0).to(WIDE)
    tl.store(out_ptr + offsets, gate / (1 + tl.exp(-gate)) * up, mask=exists)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, num_elements, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    offsets, exists = offsets_of(num_elements, BLOCK)
    grad = tl.load(grad_ptr + offsets, mask=exists, other=0.0).to(WIDE)
    gate = tl.load(gate_ptr + offsets, mask=exists, other=0.0).to(WIDE)
    up = tl.load(up_ptr + offsets, mask=exists, other=0.0).to(WIDE)
    sigmoid = 1 / (1 + tl.exp(-gate))
    silu = gate * sigmoid
    tl.store(grad_gate_ptr + offsets, grad * up * (sigmoid + silu * (1 - sigmoid)), mask=exists)
    tl.store(grad_up_ptr + offsets, grad * silu, mask=exists)


def _triton(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = contiguous(gate, up)
    out = torch.empty_like(gate)
    if out.numel():
        _kernel[grid_of(out.numel())](gate, up, out, out.numel(), WIDE=wide_type(gate), BLOCK=BLOCK)
    return out


def _triton_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grad, gate, up = contiguous(grad, gate, up)
    grads = torch.empty_like(gate), torch.empty_like(up)
    if gate.numel():
        _backward_kernel[grid_of(gate.numel())](grad, gate, up, *grads, gate.numel(), WIDE=wide_type(gate), BLOCK=BLOCK)
    return grads


def _shape(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate.new_empty(gate.shape)


def _shapes_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


_forward = register("swiglu(Tensor gate, Tensor up) -> Tensor", aten=_aten, triton=_triton, shapes=_shape)
_backward = register(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    aten=_aten_backward,
    triton=_triton_backward,
    shapes=_shapes_backward,
)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grads: tuple[torch.Tensor, torch.Tensor] = _backward(grad, *ctx.saved_tensors)
    return grads


differentiable(_forward, save=_save, backward=_gradient)
