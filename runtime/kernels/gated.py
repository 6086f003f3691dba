"""What SwiGLU and GeGLU share: ``activation(gate) · up`` and its gradient, keeping nothing but the inputs."""

from __future__ import annotations

import torch

from runtime.kernels.activations import FEW, PLAIN, activate, activation_and_slope, activation_gradient
from runtime.kernels.elementwise import BLOCK, block_of, same_rows, wide_type
from runtime.kernels.language import tl, triton
from runtime.kernels.library import WIDE, gradients_of, in_dtype, is_torchs_own, promoted, wide, wide_dtype


def check_shapes(gate: torch.Tensor, up: torch.Tensor) -> None:
    """Raises ValueError unless the two have one shape."""
    if gate.shape != up.shape:
        raise ValueError(
            f"gate is {tuple(gate.shape)} and up {tuple(up.shape)}: expected one shape; expand the smaller to the other"
        )


def torchs_own(gate: torch.Tensor, up: torch.Tensor, *, activation: str) -> torch.Tensor | None:
    """The operator as torch differentiates it, which keeps the activation, too; None where that would not do.

    Of so few elements calls take longer than arithmetic, and memory does not matter.
    """
    if gate.numel() > FEW or not is_torchs_own(gate, up):
        return None
    return (PLAIN[activation](gate) * up).contiguous()


def aten(gate: torch.Tensor, up: torch.Tensor, *, activation: str) -> torch.Tensor:
    """``activation(gate) · up``, contiguous, in the type to which the two promote."""
    if gate.dtype is up.dtype and gate.dtype in WIDE:
        return PLAIN[activation](gate).mul_(up).contiguous()
    dtype = wide_dtype(gate, up)
    if gate.dtype is dtype:
        out = PLAIN[activation](gate)
    else:
        out = gate.to(dtype)
        activate(out, activation, out=out)
    return in_dtype(out.mul_(up), promoted(gate, up)).contiguous()


def aten_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up, contiguous; the activation is computed again."""
    if gate.dtype is up.dtype is grad.dtype and gate.dtype in WIDE:
        grad_gate = grad * up
        activation_gradient(grad_gate, gate, activation, out=grad_gate)
        return grad_gate.contiguous(), PLAIN[activation](gate).mul_(grad).contiguous()
    dtype = wide_dtype(gate, up)
    grad, gate_wide = in_dtype(grad, dtype), in_dtype(gate, dtype)
    grad_gate = grad * wide(up)
    activation_gradient(grad_gate, gate_wide, activation, out=grad_gate)
    grad_up = PLAIN[activation](gate_wide).mul_(grad)
    return in_dtype(grad_gate, gate.dtype).contiguous(), in_dtype(grad_up, up.dtype).contiguous()


def plain_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, activation: str
) -> tuple[torch.Tensor | None, ...]:
    """``aten_backward`` from operators that autograd differentiates."""

    def definition(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        dtype = wide_dtype(gate, up)
        return (PLAIN[activation](gate.to(dtype)) * up.to(dtype)).to(grad.dtype)

    return gradients_of(definition, (gate, up), grad)


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, width, NAME: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, columns, exists = block_of(width, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=exists, other=0.0).to(WIDE)
    up = tl.load(up_ptr + row * up_stride + columns, mask=exists, other=0.0).to(WIDE)
    value, _ = activation_and_slope(gate, NAME)
    tl.store(out_ptr + row * width + columns, value * up, mask=exists)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, grad_stride, gate_stride, up_stride, width,
    NAME: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, columns, exists = block_of(width, BLOCK)
    grad = tl.load(grad_ptr + row * grad_stride + columns, mask=exists, other=0.0).to(WIDE)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=exists, other=0.0).to(WIDE)
    up = tl.load(up_ptr + row * up_stride + columns, mask=exists, other=0.0).to(WIDE)
    value, slope = activation_and_slope(gate, NAME)
    tl.store(grad_gate_ptr + row * width + columns, grad * up * slope, mask=exists)
    tl.store(grad_up_ptr + row * width + columns, grad * value, mask=exists)


def triton_forward(gate: torch.Tensor, up: torch.Tensor, *, activation: str) -> torch.Tensor:
    """As ``aten``, in one kernel."""
    out = shape(gate, up)
    if out.numel():
        rows = same_rows(gate, up)
        _kernel[rows.grid](
            *rows.tensors, out, *rows.strides, rows.width, NAME=activation, WIDE=wide_type(out), BLOCK=BLOCK
        )
    return out


def triton_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``aten_backward``, in one kernel."""
    grads = shapes_backward(grad, gate, up)
    if gate.numel():
        rows = same_rows(grad, gate, up)
        _backward_kernel[rows.grid](
            *rows.tensors, *grads, *rows.strides, rows.width, NAME=activation, WIDE=wide_type(grad), BLOCK=BLOCK
        )
    return grads


def shape(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """An empty tensor for the output."""
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


def shapes_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty tensors for the gradients of gate and up."""
    return gate.new_empty(gate.shape), up.new_empty(up.shape)
