"""Activations of experts by name: what makes the inner vector of an expert of its first product, and the gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from runtime.kernels import gated
from runtime.kernels.activations import PLAIN, SILU, activation_gradient
from runtime.kernels.dispatch import runs_triton
from runtime.kernels.expert_row_kernels import gated_gradients, gated_values
from runtime.kernels.library import in_dtype, wide
from runtime.kernels.row_blocks import in_row_blocks

_aten: Any = torch.ops.aten

#: GPT-OSS: where the two halves are clamped, and the factor in its sigmoid (OpenAI, "gpt-oss model card", 2025).
CLAMP, SHARPNESS = 7.0, 1.702


@dataclass(frozen=True)
class ExpertActivation:
    """One activation: ``inner`` and ``by_hidden`` compute it by kernels where there are, else as the attributes say.

    Attributes:
        value: [R, out1] → [R, F].
        gradient: (gradient of the value, the [R, out1]) → gradient of the latter.
        definition: ``value`` by operators that autograd differentiates any number of times.
        halves: out1 / F: 2 with a gate.
        interleaved: whether gate and up take turns, rather than lie one behind the other.
        kernel: what ``expert_row_kernels.gated_values`` calls it, or None: only with a gate are there kernels.
    """

    value: Callable[[torch.Tensor], torch.Tensor]
    gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    definition: Callable[[torch.Tensor], torch.Tensor]
    halves: int = 1
    interleaved: bool = False
    kernel: str | None = None

    def inner(
        self, hidden: torch.Tensor, *, weights: torch.Tensor | None = None, by_inner: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Inner vectors [R, F] of ``hidden`` [R, out1], each times its weight [R].

        Also, if ``by_inner`` [R, F] is given, its inner product with each of them, unweighed: [R] in at least float32.
        """
        if self.kernel is not None and runs_triton(hidden):
            kind: dict[str, Any] = {"name": self.kernel, "interleaved": self.interleaved}
            return gated_values(hidden, **kind, weights=weights, by_value=by_inner)
        inner = self.value(hidden)
        products = None if by_inner is None else in_row_blocks(_row_products, by_inner, inner)
        return inner if weights is None else inner.mul_(weights.unsqueeze(1)), products

    def by_hidden(
        self, by_inner: torch.Tensor, hidden: torch.Tensor, *, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The gradient of ``hidden``, from that of the weighed inner vectors, which may be overwritten."""
        if self.kernel is not None and runs_triton(hidden):
            return gated_gradients(by_inner, hidden, name=self.kernel, interleaved=self.interleaved, weights=weights)
        return self.gradient(by_inner if weights is None else by_inner.mul_(weights.unsqueeze(1)), hidden)


def _row_products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The inner product of each row of [R, N] and [R, N], in at least float32: [R]."""
    return (wide(left) * wide(right)).sum(1)


def _gated_value(hidden: torch.Tensor, *, name: str) -> torch.Tensor:
    return in_row_blocks(lambda some: gated.aten(*some.chunk(2, dim=-1), activation=name), hidden)


def _gated_gradient(grad: torch.Tensor, hidden: torch.Tensor, *, name: str) -> torch.Tensor:
    return torch.cat(gated.aten_backward(grad, *hidden.chunk(2, dim=-1), activation=name), dim=-1)


def _gated_definition(hidden: torch.Tensor, *, name: str) -> torch.Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return PLAIN[name](gate) * up


def _gated(name: str) -> ExpertActivation:
    return ExpertActivation(
        partial(_gated_value, name=name),
        partial(in_row_blocks, partial(_gated_gradient, name=name)),
        partial(_gated_definition, name=name),
        2,
        kernel=name,
    )


def _gated_by(
    function: Callable[[torch.Tensor], torch.Tensor], slope: Callable[[torch.Tensor], torch.Tensor]
) -> ExpertActivation:
    """``function(gate) * up``, with the slope of ``function`` at a gate."""

    def definition(hidden: torch.Tensor) -> torch.Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return function(gate) * up

    def value(hidden: torch.Tensor) -> torch.Tensor:
        return in_dtype(definition(wide(hidden)), hidden.dtype)

    def gradient(grad: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = wide(hidden).chunk(2, dim=-1)
        parts = (wide(grad) * up * slope(gate), wide(grad) * function(gate))
        return in_dtype(torch.cat(parts, dim=-1), hidden.dtype)

    return ExpertActivation(partial(in_row_blocks, value), partial(in_row_blocks, gradient), definition, 2)


def _sigmoid_slope(gate: torch.Tensor) -> torch.Tensor:
    share = torch.sigmoid(gate)
    return share * (1 - share)


def _clamped_definition(hidden: torch.Tensor) -> torch.Tensor:
    gate, up = hidden[..., 0::2].clamp(max=CLAMP), hidden[..., 1::2].clamp(-CLAMP, CLAMP)
    return (up + 1) * gate * torch.sigmoid(SHARPNESS * gate)


def _clamped_value(hidden: torch.Tensor) -> torch.Tensor:
    return in_dtype(_clamped_definition(wide(hidden)), hidden.dtype)


def _clamped_gradient(grad: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    pairs, grad = wide(hidden), wide(grad)
    gate, up = pairs[..., 0::2].clamp(max=CLAMP), pairs[..., 1::2].clamp(-CLAMP, CLAMP)
    share = torch.sigmoid(SHARPNESS * gate)
    result = torch.empty_like(pairs)
    slope = share * (1 + SHARPNESS * gate * (1 - share))
    result[..., 0::2] = grad * (up + 1) * slope * (pairs[..., 0::2] <= CLAMP)
    result[..., 1::2] = grad * gate * share * (pairs[..., 1::2].abs() <= CLAMP)
    return in_dtype(result, hidden.dtype)


def _plain_gradient(grad: torch.Tensor, hidden: torch.Tensor, *, name: str) -> torch.Tensor:
    result = torch.empty_like(hidden)
    activation_gradient(grad, hidden, name, out=result)
    return result


def _plain(name: str) -> ExpertActivation:
    return ExpertActivation(PLAIN[name], partial(_plain_gradient, name=name), PLAIN[name])


def _with_gradient(
    function: Callable[[torch.Tensor], torch.Tensor],
    gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> ExpertActivation:
    return ExpertActivation(function, gradient, function)


def _squared_relu(hidden: torch.Tensor) -> torch.Tensor:
    return torch.relu(hidden) ** 2


#: Every activation that ``experts`` knows.
ACTIVATIONS: dict[str, ExpertActivation] = {
    "swiglu": _gated(SILU),
    "geglu": _gated("gelu"),
    "geglu_tanh": _gated("gelu_tanh"),
    "reglu": _gated_by(torch.relu, lambda gate: (gate > 0).to(gate.dtype)),
    "glu": _gated_by(torch.sigmoid, _sigmoid_slope),
    "swiglu_clamped": ExpertActivation(
        partial(in_row_blocks, _clamped_value),
        partial(in_row_blocks, _clamped_gradient),
        _clamped_definition,
        2,
        interleaved=True,
        kernel="clamped",
    ),
    "silu": _plain(SILU),
    "gelu": _plain("gelu"),
    "gelu_tanh": _plain("gelu_tanh"),
    "relu": _with_gradient(torch.relu, lambda grad, hidden: grad * (hidden > 0)),
    "relu2": _with_gradient(_squared_relu, lambda grad, hidden: grad * 2 * torch.relu(hidden)),
    "tanh": _with_gradient(torch.tanh, lambda grad, hidden: _aten.tanh_backward(grad, torch.tanh(hidden))),
    "leaky_relu": _with_gradient(
        F.leaky_relu, lambda grad, hidden: _aten.leaky_relu_backward(grad, hidden, 0.01, False)
    ),
    "elu": _with_gradient(F.elu, lambda grad, hidden: _aten.elu_backward(grad, 1.0, 1.0, 1.0, False, hidden)),
    "mish": _with_gradient(F.mish, _aten.mish_backward.default),
    "hardswish": _with_gradient(F.hardswish, _aten.hardswish_backward.default),
}
