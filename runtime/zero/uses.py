"""Working weights in autograd: leaves that stand for a unit, and nodes that hand it the weights' gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from runtime.kernels.direct import apply_of

#: Up to so many bytes of gradients are taken together, which takes less of the host's time than one by one.
_TOGETHER_BYTES = 2**20
#: On a GPU more: its host must launch the next kernels meanwhile, and no cache holds a gradient until it is taken.
_TOGETHER_BYTES_ON_GPU = 2**25


class Taker(Protocol):
    """The receiver of a unit's gradients."""

    @property
    def token(self) -> nn.Parameter:
        """The leaf of all its uses."""
        ...

    def take(self, start: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """The gradients of weights from ``start`` on in one use."""
        ...

    def end_use(self, gradients: Sequence[torch.Tensor | None] = ()) -> None:
        """The gradients of one use are complete, with these."""
        ...


def taken_together(sizes: Sequence[int], *, on_gpu: bool, splits_backward: bool) -> list[int]:
    """How many neighbouring weights share a node, which takes their gradients together.

    Args:
        sizes: bytes of each weight.
        splits_backward: backward passes are split, and must be able to tell large weights apart.
    """
    if sum(sizes) <= _TOGETHER_BYTES:
        return [len(sizes)]
    if splits_backward or not on_gpu:
        return [1] * len(sizes)
    counts, together = [0], 0
    for size in sizes:
        if counts[-1] and together + size > _TOGETHER_BYTES_ON_GPU:
            counts.append(0)
            together = 0
        counts[-1] += 1
        together += size
    return counts


def used_at_once(taker: Taker, wholes: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Differentiable views of weights whose gradients ``taker`` gets all at once."""
    used: tuple[torch.Tensor, ...] = _at_once(taker.token, taker, wholes)
    return used


def used_in_groups(taker: Taker, wholes: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Differentiable views of weights, with a node for each group of neighbours of so many.

    Groups of one can be told apart by a split backward pass, and a gradient is taken while the processor has it in its
    cache rather than kept until others are there.
    """
    anchors = _anchors(taker.token, taker, len(sizes))
    used: list[torch.Tensor] = []
    for anchor, size in zip(anchors, sizes):
        start = len(used)
        used += _group(anchor, taker, start, wholes[start : start + size])
    return tuple(used)


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
    """From the token to a number for each group: in the backward pass, what comes after all of them."""

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


class _Group(torch.autograd.Function):
    """From a number of ``_Anchors`` to the weights from ``start`` on; backward hands over their gradients."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, taker: Taker, start: int, wholes: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        ctx.taker, ctx.start = taker, start
        ctx.set_materialize_grads(False)
        return tuple([whole.detach() for whole in wholes])

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.taker.take(ctx.start, gradients)
        return None, None, None, None


_at_once, _anchors, _group = apply_of(_AtOnce), apply_of(_Anchors), apply_of(_Group)
