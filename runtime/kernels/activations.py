"""Activation functions by name, with their slopes: as Triton code, and as ATen operators on tensors given to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from runtime.kernels.language import tl, triton
from runtime.torch_compat.dispatcher import native_silu

SILU = "silu"
#: ``F.gelu``'s ``approximate`` to the name used here.
_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}

#: In GELU through tanh: 2·sqrt(2/π), and that times the factor of the cube.
_TANH_SLOPE = 1.5957691216057308
_TANH_CUBE = _TANH_SLOPE * 0.044715

#: Up to so many elements, fewer operators are faster than faster ones.
FEW = 2**13

_aten: Any = torch.ops.aten


def _gelu_tanh(tensor: torch.Tensor, *, out: torch.Tensor) -> None:
    """By ``(1 + tanh u) / 2 = sigmoid(2u)``, which processors compute faster, and which loses nothing near -1.

    Of few elements, for which calling so many operators would take longer, in one.
    """
    if tensor.numel() <= FEW:
        _aten.gelu.out(tensor, approximate="tanh", out=out)
        return
    share = (tensor * tensor).mul_(_TANH_CUBE).add_(_TANH_SLOPE).mul_(tensor).sigmoid_()
    torch.mul(tensor, share, out=out)


def is_one_operator(approximate: str, count: int) -> bool:
    """Whether GELU of so many elements is computed by torch's operator of that name."""
    return approximate == "none" or count <= FEW


#: Name to: value, and gradient.
_ATEN: dict[str, tuple[Any, Any]] = {
    SILU: (_aten.silu.out, _aten.silu_backward.grad_input),
    "gelu": (_aten.gelu.out, _aten.gelu_backward.grad_input),
    "gelu_tanh": (_gelu_tanh, partial(_aten.gelu_backward.grad_input, approximate="tanh")),
}


#: The same as torch differentiates them, any number of times.
PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    SILU: native_silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def gelu_name(approximate: str) -> str:
    """The GELU that ``F.gelu`` calls ``approximate``: exact for ``"none"``, through tanh for ``"tanh"``.

    Raises:
        ValueError: for anything else.
    """
    if approximate not in _GELUS:
        raise ValueError(f"approximate={approximate!r}: expected one of {', '.join(map(repr, _GELUS))}")
    return _GELUS[approximate]


def activate(tensor: torch.Tensor, name: str, *, out: torch.Tensor) -> None:
    """Write the activation of ``tensor`` to ``out``, which may be ``tensor``."""
    value, _ = _ATEN[name]
    value(tensor, out=out)


def activation_gradient(grad: torch.Tensor, tensor: torch.Tensor, name: str, *, out: torch.Tensor) -> None:
    """Write ``grad`` times the activation's slope at ``tensor`` to ``out``, which may be either of them."""
    _, gradient = _ATEN[name]
    gradient(grad, tensor, grad_input=out)


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    """The sigmoid and its complement to 1, which a subtraction would round away."""
    return 1 / (1 + tl.exp(-x)), 1 / (1 + tl.exp(x))


@triton.jit
def activation_and_slope(x, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    """Value and slope; what is not used is never computed."""
    if NAME == "silu":
        share, rest = _sigmoid(x)
        slope = share + x * share * rest
    elif NAME == "gelu_tanh":
        # As in ``_gelu_tanh``; written out, since kernels may not read globals: 2·sqrt(2/π), 0.044715, 3·0.044715.
        share, rest = _sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
        slope = share + x * share * rest * 1.5957691216057308 * (1 + 0.134145 * x * x)
    else:
        # The normal distribution's share below x, and its density, whose factor is 1/sqrt(2π) = 0.3989….
        share = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        slope = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return x * share, slope
