"""A loss that a script differentiates itself under a pipeline.

A pipeline runs forward and backward of its micro-batches interleaved. So a call of the module runs the whole step, and
the gradients of its loss are put aside until ``loss.backward()`` adds them, multiplied by the gradient that arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from runtime.execution.deferred_entries import entry_keys
from runtime.execution.deferred_outputs import below, can_be_deferred, deferred
from runtime.execution.deferred_values import LeftOut
from runtime.parameters.sharded import as_seen, local_of
from runtime.torch_compat.autograd_engine import gradient_node, will_run


def differentiable(
    loss_path: str,
    rebuild: Callable[[dict[str, Any]], Any],
    owners: Iterable[nn.Parameter],
    parameters: Sequence[torch.Tensor],
    step: Callable[[], torch.Tensor],
) -> Any:
    """What a model returns whose loss ``step`` computes, with gradients that are added by the loss's backward.

    Args:
        loss_path: where the loss stands in the model's output; "" if that is the loss.
        rebuild: makes what the model returns of its outputs by path.
        owners: those to whose ``grad`` ``step`` adds.
        parameters: the trained ones as users see them, which may be asked for: ``torch.autograd.grad(loss, …)``.
    """
    seen = {id(local_of(one)) for one in parameters}
    gradients = _gradients_of([owner for owner in owners if id(owner) in seen], step)
    anchor = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        loss = _AddGradients.apply(gradients, gradient_node(anchor), anchor, *parameters)  # type: ignore[no-untyped-call]
    return _LossAlone(loss_path, loss).deferred(rebuild)


def without_gradients(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a pipeline computes without a loss: a script that differentiates it is told why it cannot."""
    anchor = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        return {
            path: _Undifferentiated.apply(anchor, tensor) if tensor.is_floating_point() else tensor  # type: ignore[no-untyped-call]
            for path, tensor in outputs.items()
        }


class _Undifferentiated(torch.autograd.Function):
    """A tensor as it is; its backward is an error."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        raise ValueError(
            "these outputs have no gradients: under a pipeline forward and backward of micro-batches interleave, so "
            "what is differentiated must be the model's own loss, of a call in training mode (parallel.train_step "
            "gives its gradients in either mode). Pass loss_fn to planner.compile, let the model return its loss, or "
            "plan with pp=1"
        )


class NoOutputError(ValueError, AttributeError):
    """An output that a pipeline's step does not keep; ``hasattr`` answers no."""


class _LossAlone(dict[str, Any]):
    """The one output of a pipeline's step by its path; the others are left out."""

    def __init__(self, path: str, loss: torch.Tensor) -> None:
        super().__init__({path: loss})
        self.path = path
        self.left_out: list[str] = []

    def __missing__(self, path: str) -> LeftOut:
        self.left_out.append(path)
        return LeftOut(f"output {path!r}, which the step left out", lambda: self._refuse(path))

    def _refuse(self, path: str) -> torch.Tensor:
        raise self.missing(path)

    def missing(self, key: Any) -> NoOutputError:
        return NoOutputError(
            f"output {key!r} is not there: under a pipeline a call in training mode computes its loss "
            f"({self.path!r}) and the gradients in one go, and keeps nothing else. Compute the loss inside of the "
            "model (or by loss_fn), call the module under torch.no_grad() or in evaluation mode for the other "
            "outputs, or plan with pp=1"
        )

    def entry(self, key: Any) -> Any:
        """Nothing is fetched."""
        raise self.missing(key)

    def deferred(self, rebuild: Callable[[dict[str, Any]], Any]) -> Any:
        """What the model returns, of which there is the loss alone: others raise an error when they are read."""
        example = rebuild(self)
        if isinstance(example, torch.Tensor) or not can_be_deferred(example):
            return example
        absent = [
            key for key in entry_keys(example) if below(example, key, self.left_out) and not below(example, key, self)
        ]
        return deferred(example, self, pending=(), absent=absent)


class _Gradients:
    """The loss of one step, and what its backward adds."""

    def __init__(self, loss: torch.Tensor, pairs: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
        self.loss = loss
        self._pairs: list[tuple[nn.Parameter, torch.Tensor]] | None = pairs

    def add(self, factor: torch.Tensor) -> None:
        """Add the gradients, multiplied by ``factor``, to the owners' ``grad``."""
        for owner, gradient in self._taken(factor):
            owner.grad = gradient if owner.grad is None else owner.grad + gradient

    def of(self, parameters: Sequence[torch.Tensor], factor: torch.Tensor) -> list[torch.Tensor | None]:
        """The gradients of ``parameters``, multiplied by ``factor``; None of those that have none."""
        by_owner = {id(owner): gradient for owner, gradient in self._taken(factor)}
        return [as_seen(one, by_owner.get(id(local_of(one)))) for one in parameters]

    def _taken(self, factor: torch.Tensor) -> list[tuple[nn.Parameter, torch.Tensor]]:
        if self._pairs is None:
            raise ValueError("the gradients of this loss have been added: call the model again before each backward")
        pairs, self._pairs = self._pairs, None
        for _, gradient in pairs:
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
        return pairs


def _gradients_of(parameters: list[nn.Parameter], step: Callable[[], torch.Tensor]) -> _Gradients:
    """Run ``step`` as if no parameter had a gradient yet, and take those that it leaves."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        loss = step()
        return _Gradients(loss, [(one, one.grad) for one in parameters if one.grad is not None])
    finally:
        for parameter, gradient in zip(parameters, before):
            parameter.grad = gradient


class _AddGradients(torch.autograd.Function):
    """The loss; its backward adds what was put aside, or hands on what is asked for.

    Of the tensors, the first belongs to passes that ask for nothing in particular, the others are parameters.
    """

    @staticmethod
    def forward(
        ctx: Any, gradients: _Gradients, node_of_every_pass: Node, anchor: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.gradients, ctx.node_of_every_pass, ctx.parameters = gradients, node_of_every_pass, parameters
        return gradients.loss.clone()

    @staticmethod
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if will_run(ctx.node_of_every_pass):
            ctx.gradients.add(factor.detach())
            return None, None, None, *(None for _ in ctx.parameters)
        return None, None, None, *ctx.gradients.of(ctx.parameters, factor.detach())
