"""The norm of all gradients, and clipping by it, where every rank holds only pieces of them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from runtime.torch_compat.host_state import norm_of_all, scale_all
from runtime.zero.group import StateGroup

#: Whether a rank counts a parameter; of virtual ranks a number for each.
Counts = bool | torch.Tensor

#: Keeps the scale finite where the norm is zero, as ``torch.nn.utils.clip_grad_norm_`` does.
_SMALL = 1e-6


def gradient_norm(
    parameters: Iterable[tuple[nn.Parameter, Counts]], group: StateGroup, *, norm_type: float = 2.0
) -> torch.Tensor:
    """The p-norm of all gradients of the model, the same float64 scalar on every rank of ``group``.

    Args:
        parameters: what this rank owns, each with whether this rank counts it (of virtual ranks: 1 or 0 for each): of
            the ranks that hold the same piece, exactly one must.
        group: all ranks of the model; every one must call this.
        norm_type: p, above zero; infinity for the largest element.

    Raises:
        ValueError: for a p that is not above zero.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above zero (or infinity), got {norm_type}")
    owners = list(parameters)
    counted = [
        (owner.grad, counts)
        for owner, counts in owners
        if counts is not False and owner.grad is not None and owner.grad.numel()
    ]
    device = owners[0][0].device if owners else torch.device("cpu")
    norms = [norm.to(device, torch.float64) for norm in _norms([gradient for gradient, _ in counted], norm_type)]
    norms = [norm if counts is True else norm * counts for norm, (_, counts) in zip(norms, counted)]
    stacked = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=device)
    if math.isinf(norm_type):
        # The largest of a number and NaN depends on their order; infinity says as much.
        return group.wait(group.all_reduce(stacked.max().nan_to_num(nan=math.inf, posinf=math.inf), "max"))
    return group.wait(group.all_reduce(stacked.pow(norm_type).sum())).pow(1.0 / norm_type)


def clip_gradients(
    parameters: Iterable[tuple[nn.Parameter, Counts]],
    group: StateGroup,
    *,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients in place so that their norm is at most ``max_norm``; returns the norm before.

    As ``torch.nn.utils.clip_grad_norm_`` on the whole model, see ``gradient_norm`` for the arguments.

    Raises:
        ValueError: as ``gradient_norm``; for a ``max_norm`` below zero or not a number; with ``error_if_nonfinite``
            also if the norm is not finite.
    """
    check_max_norm(max_norm)
    owners = list(parameters)
    norm = gradient_norm(owners, group, norm_type=norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise ValueError(
            f"the gradients' norm of order {norm_type} is {float(norm)}: some gradient is infinite or not a number; "
            "lower the learning rate or the loss scale, or pass error_if_nonfinite=False to clip all the same"
        )
    scale = (max_norm / (norm + _SMALL)).clamp(max=1.0)
    for gradients in _by_kind([owner.grad for owner, _ in owners if owner.grad is not None]):
        scale_all(gradients, scale.to(gradients[0].device, gradients[0].dtype))
    return norm


def check_max_norm(max_norm: float, name: str = "max_norm") -> None:
    """Raise ValueError unless gradients can be scaled down to ``max_norm``: a number from 0 to infinity."""
    if not float(max_norm) >= 0:
        raise ValueError(
            f"{name}={max_norm}: gradients are scaled down to this norm, so it must be zero or above (a negative one "
            "would turn them around); infinity leaves them as they are"
        )


def _norms(gradients: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """The norm of each gradient, in order; narrow dtypes are summed in float32."""
    norm_of: dict[int, torch.Tensor] = {}
    for some in _by_kind(gradients):
        dtype = torch.promote_types(some[0].dtype, torch.float32)
        norm_of.update(zip(map(id, some), norm_of_all(some, norm_type, dtype=dtype)))
    return [norm_of[id(gradient)] for gradient in gradients]


def _by_kind(gradients: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Lists of equal device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return list(kinds.values())
