"""Comparison of a sharded model with the same model on one device, tensor by tensor."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cost_models.short_text import ShortRepr
from passes.capture.call_arguments import batch_for_loss
from runtime.execution.outputs import loss_of
from runtime.state.tensor_difference import largest_difference, largest_size

#: A gradient smaller than this part of the model's largest counts as zero up to rounding (the keys' bias has such).
NEGLIGIBLE = 1e-6
NEGLIGIBLE_LOW_PRECISION = 1e-3

#: Adam divides a gradient by its own size plus epsilon; epsilon must exceed gradients that are only rounding errors.
ADAM_EPSILON = 1e-8
ADAM_EPSILON_LOW_PRECISION = 1e-2


@dataclass(frozen=True, repr=False)
class Comparison(ShortRepr):
    """One tensor of the sharded model against the same on one device: largest difference over largest value.

    Attributes:
        rounding: the error that rounding alone explains, if measured.
    """

    what: str
    name: str
    error: float
    rounding: float = 0.0


def make_gradients_dense(module: nn.Module) -> None:
    """Convert sparse gradients of embeddings to dense ones, as a sharded model has (AdamW accepts no others)."""
    for parameter in module.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def largest_of(tensors: Mapping[str, torch.Tensor]) -> float:
    return max(map(largest_size, tensors.values()), default=0.0)


def differences(
    what: str,
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    *,
    floor: float,
    nan_agrees: bool = False,
) -> Iterator[Comparison]:
    """One comparison for each tensor of ``expected``; tensors missing in ``actual`` count as 0."""
    for name, tensor in expected.items():
        yield difference(what, name, actual.get(name, torch.zeros(())), tensor, floor=floor, nan_agrees=nan_agrees)


def difference(
    what: str,
    name: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    floor: float = 0.0,
    nan_agrees: bool = False,
) -> Comparison:
    """Largest difference relative to the largest value, or to ``floor`` if that is more (both 0: no error).

    NaN on both sides is an infinite error, as nothing was compared, unless ``nan_agrees``: a buffer may hold some.
    """
    if not expected.numel():
        return Comparison(what, name, 0.0)
    if not nan_agrees and bool(expected.isnan().any()):
        return Comparison(what, name, math.inf)
    scale = max(largest_size(expected), floor)
    difference = largest_difference(actual, expected)
    return Comparison(what, name, difference / scale if scale else difference)


def single_loss(model: nn.Module, args: Any, kwargs: Any, loss_fn: Callable[..., Any] | None) -> torch.Tensor:
    """The loss of the unsharded model."""
    if loss_fn is None:
        return loss_of(model(*args, **kwargs))
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    accepted = {name: value for name, value in kwargs.items() if takes_any or name in parameters}
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters.values())
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters.values()):
        count = len(args)
    return loss_fn(model(*args[:count], **accepted), batch_for_loss(tuple(args), kwargs, parameters))
