"""Working weights in autograd: leaves that stand for a unit, and nodes that hand it the weights' gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from runtime.kernels.direct import apply_of


class Taker(Protocol):
    """The receiver of a unit's gradients."""

    @property
    def token(self) -> nn.Parameter:
        """The leaf of all its uses."""
        ...

    def take(self, nr: int, gradient: torch.Tensor | None) -> None:
        """The gradient of weight ``nr`` in one use."""
        ...

    def end_use(self, gradients: Sequence[torch.Tensor | None] = ()) -> None:
        """The gradients of one use are complete, with these."""
        ...


def used_at_once(taker: Taker, wholes: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Differentiable views of weights whose gradients ``taker`` gets all at once."""
    used: tuple[torch.Tensor, ...] = _at_once(taker.token, taker, wholes)
    return used


def used_one_by_one(taker: Taker, wholes: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Differentiable views of weights, with a node for each.

    A split backward pass can tell them apart, and a gradient is taken while the processor has it in its cache rather
    than kept until the others are there.
    """
    anchors = _anchors(taker.token, taker, len(wholes))
    return tuple([_weight(anchor, taker, nr, whole) for nr, (anchor, whole) in enumerate(zip(anchors, wholes))])


def _differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's ``once_differentiable``, which costs nothing where nobody differentiates gradients."""
    checked = torch.autograd.function.once_differentiable(backward)

    def run(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return (checked if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return run


class _AtOnce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, taker: Taker, wholes: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        ctx.taker = taker
        ctx.set_materialize_grads(False)
        return tuple(whole.detach() for whole in wholes)

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.taker.end_use(gradients)
        return torch.zeros_like(ctx.taker.token), None, None


class _Anchors(torch.autograd.Function):
    """From the token to a number for each weight: in the backward pass, what comes after all of them."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, taker: Taker, count: int) -> tuple[torch.Tensor, ...]:
        ctx.taker = taker
        ctx.set_materialize_grads(False)
        return tuple(token.new_zeros(count).unbind())

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, *_: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.taker.end_use()
        return torch.zeros_like(ctx.taker.token), None, None


class _Weight(torch.autograd.Function):
    """From a number of ``_Anchors`` to a weight; backward hands over its gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, taker: Taker, nr: int, whole: torch.Tensor) -> torch.Tensor:
        ctx.taker, ctx.nr = taker, nr
        ctx.set_materialize_grads(False)
        return whole.detach()

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.taker.take(ctx.nr, gradient)
        return None, None, None, None


_at_once, _anchors, _weight = apply_of(_AtOnce), apply_of(_Anchors), apply_of(_Weight)
