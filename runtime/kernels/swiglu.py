"""SwiGLU, ``silu(gate) · up`` (Shazeer, "GLU Variants Improve Transformer", 2020)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from runtime.kernels import gated
from runtime.kernels.activations import SILU
from runtime.kernels.library import differentiable, differentiable_again, register


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) · up`` of two tensors of one shape, rounded once to the type to which the two promote.

    Halves of one packed projection are read where they lie. Backward keeps the two inputs only
    (of a few elements on a processor the activation, too).

    Raises:
        ValueError: if the shapes differ.
    """
    gated.check_shapes(gate, up)
    result: torch.Tensor | None = gated.torchs_own(gate, up, activation=SILU)
    return _forward(gate, up) if result is None else result


_forward = register(
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    aten=partial(gated.aten, activation=SILU),
    triton=partial(gated.triton_forward, activation=SILU),
    shapes=gated.shape,
)
_backward = register(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    aten=partial(gated.aten_backward, activation=SILU),
    triton=partial(gated.triton_backward, activation=SILU),
    shapes=gated.shapes_backward,
)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grads: tuple[torch.Tensor, torch.Tensor] = _backward(grad, *ctx.saved_tensors)
    return grads


differentiable(_forward, save=_save, backward=_gradient)
differentiable_again(_backward, partial(gated.plain_backward, activation=SILU))
