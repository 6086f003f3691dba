"""GeGLU, ``gelu(gate) · up`` (Shazeer, "GLU Variants Improve Transformer", 2020)."""

from __future__ import annotations

from typing import Any

import torch

from runtime.kernels import gated
from runtime.kernels.activations import gelu_name
from runtime.kernels.library import differentiable, differentiable_again, register


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """``gelu(gate) · up`` of two tensors of one shape, rounded once to the type to which the two promote.

    Halves of one packed projection are read where they lie. Backward keeps the two inputs only
    (of a few elements on a processor the activation, too).

    Args:
        approximate: ``"none"`` or ``"tanh"``, as in ``F.gelu``.

    Raises:
        ValueError: if the shapes differ, or for another ``approximate``.
    """
    gated.check_shapes(gate, up)
    result: torch.Tensor | None = gated.torchs_own(gate, up, activation=gelu_name(approximate))
    return _forward(gate, up, approximate) if result is None else result


def _aten(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return gated.aten(gate, up, activation=gelu_name(approximate))


def _aten_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return gated.aten_backward(grad, gate, up, activation=gelu_name(approximate))


def _plain_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, approximate: str
) -> tuple[torch.Tensor | None, ...]:
    return gated.plain_backward(grad, gate, up, activation=gelu_name(approximate))


def _triton(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return gated.triton_forward(gate, up, activation=gelu_name(approximate))


def _triton_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return gated.triton_backward(grad, gate, up, activation=gelu_name(approximate))


def _shape(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return gated.shape(gate, up)


def _shapes_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return gated.shapes_backward(grad, gate, up)


_forward = register(
    'geglu(Tensor gate, Tensor up, str approximate="none") -> Tensor', aten=_aten, triton=_triton, shapes=_shape
)
_backward = register(
    "geglu_backward(Tensor grad, Tensor gate, Tensor up, str approximate) -> (Tensor, Tensor)",
    aten=_aten_backward,
    triton=_triton_backward,
    shapes=_shapes_backward,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gate, up, ctx.approximate = inputs
    ctx.save_for_backward(gate, up)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    return *_backward(grad, *ctx.saved_tensors, ctx.approximate), None


differentiable(_forward, save=_save, backward=_gradient)
differentiable_again(_backward, _plain_backward)
