"""Operators for what torch's own do not say in a graph: checks that raise, functions of scipy, CTC losses.

The shapes that torch's CTC loss makes for its backward depend on values; this one makes them anew in its backward.
"""

from __future__ import annotations

from typing import Any

import torch

CTC_LOSSES = "meshwright.ctc_losses.default"

#: Log-probabilities [frames, samples, classes]; targets in rows, or all samples' behind one another.
_OF_CTC = "Tensor log_probabilities, Tensor targets, Tensor frames, Tensor lengths, int blank, bool zero_infinity"

_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
_LIBRARY.define("checked(Tensor value, Tensor condition, bool expected, str reason) -> Tensor")
_LIBRARY.define("checked_each(Tensor value, Tensor flags, bool expected, str reason) -> Tensor")
_LIBRARY.define("decided(Tensor value, Tensor condition, int number, bool answer, str place) -> Tensor")
_LIBRARY.define("linear_sum_assignment(Tensor cost, bool maximize=False) -> (Tensor, Tensor)")


_LIBRARY.define(f"ctc_losses({_OF_CTC}) -> Tensor")
_LIBRARY.define(f"ctc_losses_backward(Tensor gradient, {_OF_CTC}) -> Tensor")


def _checked(value: torch.Tensor, condition: torch.Tensor, expected: bool, reason: str) -> torch.Tensor:
    """``value``, if ``condition`` is ``expected`` (``checked_each``: each of its elements, one for each of ``value``).

    Raises:
        ValueError: if not; ``reason`` is its text.
    """
    if bool((condition != expected).any()):
        raise ValueError(reason)
    return value.clone()


def _decided(value: torch.Tensor, *_: Any) -> torch.Tensor:
    """``value``: a mark of a trace on the flag of a question and what the trace answered; no program has it."""
    return value.clone()


def _assignment(cost: torch.Tensor, maximize: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of the best assignment, as ``scipy.optimize.linear_sum_assignment`` gives them."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(cost.detach().cpu().numpy(), maximize)
    return torch.from_numpy(rows).to(cost.device), torch.from_numpy(columns).to(cost.device)


def _assignment_shapes(cost: torch.Tensor, maximize: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    count = min(cost.shape)
    return cost.new_empty((count,), dtype=torch.int64), cost.new_empty((count,), dtype=torch.int64)


def _ctc_losses(*arguments: Any) -> torch.Tensor:
    """The loss of each sample; infinite where frames are too few."""
    losses: torch.Tensor = torch.ops.aten._ctc_loss.Tensor(*arguments)[0]
    return losses


def _ctc_losses_backward(gradient: torch.Tensor, *arguments: Any) -> torch.Tensor:
    *tensors, blank, zero_infinity = arguments
    losses, alphas = torch.ops.aten._ctc_loss.Tensor(*arguments)
    result: torch.Tensor = torch.ops.aten._ctc_loss_backward.Tensor(
        gradient, *tensors, losses, alphas, blank, zero_infinity
    )
    return result


def _save_ctc(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _ctc_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    arguments = (*ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return torch.ops.meshwright.ctc_losses_backward(gradient, *arguments), None, None, None, None, None


def _only_to_value(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return gradient, *[None] * (len(ctx.needs_input_grad) - 1)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("checked", _checked, _key)
    _LIBRARY.impl("checked_each", _checked, _key)
    _LIBRARY.impl("decided", _decided, _key)
    _LIBRARY.impl("ctc_losses", _ctc_losses, _key)
    _LIBRARY.impl("ctc_losses_backward", _ctc_losses_backward, _key)
    _LIBRARY.impl("linear_sum_assignment", _assignment, _key)
for _name in ("checked", "checked_each", "decided"):
    torch.library.register_fake(f"meshwright::{_name}", lambda value, *_: torch.empty_like(value), lib=_LIBRARY)
    torch.library.register_autograd(f"meshwright::{_name}", _only_to_value, lib=_LIBRARY)
torch.library.register_fake("meshwright::linear_sum_assignment", _assignment_shapes, lib=_LIBRARY)
torch.library.register_fake(
    "meshwright::ctc_losses", lambda values, *_: values.new_empty((values.shape[1],)), lib=_LIBRARY
)
torch.library.register_fake(
    "meshwright::ctc_losses_backward", lambda gradient, values, *_: torch.empty_like(values), lib=_LIBRARY
)
torch.library.register_autograd("meshwright::ctc_losses", _ctc_gradient, setup_context=_save_ctc, lib=_LIBRARY)
