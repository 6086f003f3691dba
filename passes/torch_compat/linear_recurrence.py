"""Linear recurrences over a dim of tensors, which torch has no operator of: ``h[t] = a[t] * h[t-1] + b[t]``.

State-space and gated linear recurrent layers are this with other ``a`` and ``b``: the selective scan of Mamba (Gu and
Dao 2023, eq. 2), the RG-LRU of Griffin (De et al. 2024, eq. 4), numerator and denominator of RWKV-4.
"""

from __future__ import annotations

from typing import Any

import torch

LINEAR_RECURRENCE = "meshwright.linear_recurrence.default"

_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
_LIBRARY.define(
    "linear_recurrence(Tensor factors, Tensor inputs, Tensor? initial, int dim, bool reverse=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def linear_recurrence(
    factors: torch.Tensor, inputs: torch.Tensor, initial: torch.Tensor | None = None, *, dim: int, reverse: bool = False
) -> torch.Tensor:
    """All states ``h[t] = factors[t] * h[t-1] + inputs[t]`` along a dim; element by element in the other dims.

    One operator of the graph however many tokens there are, where a loop in Python makes several for each. Two
    floating-point operations an element; the gradient is the same recurrence in the other direction.

    Args:
        factors, inputs: [..., tokens, ...] of one shape and floating-point dtype; tokens stand along ``dim``.
        initial: [..., ...] without ``dim``: the state before the first token; None for zeros.
        reverse: from the last token to the first: ``h[t] = factors[t] * h[t+1] + inputs[t]``.

    Returns:
        the states, in the shape of ``inputs``.

    Raises:
        ValueError: if shapes or dtypes differ.
    """
    states: torch.Tensor = torch.ops.meshwright.linear_recurrence(factors, inputs, initial, dim, reverse)
    return states


def _check(factors: torch.Tensor, inputs: torch.Tensor, initial: torch.Tensor | None, dim: int) -> int:
    """``dim`` counted from the first.

    Raises:
        ValueError: for tensors that do not fit together.
    """
    if factors.shape != inputs.shape or not -inputs.dim() <= dim < inputs.dim():
        raise ValueError(
            f"linear_recurrence: factors {list(factors.shape)} and inputs {list(inputs.shape)} must have one shape "
            f"with a dim {dim}: expand the one that is smaller"
        )
    place = dim % inputs.dim()
    others = [*inputs.shape[:place], *inputs.shape[place + 1 :]]
    if initial is not None and list(initial.shape) != others:
        raise ValueError(
            f"linear_recurrence: initial is {list(initial.shape)}, expected {others}: one without dim {dim}"
        )
    dtypes = {tensor.dtype for tensor in (factors, inputs, initial) if tensor is not None}
    if len(dtypes) > 1 or not inputs.is_floating_point():
        names = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"linear_recurrence: factors, inputs and initial must be of one floating dtype, not {names}")
    return place


def one_by_one(
    factors: torch.Tensor, inputs: torch.Tensor, initial: torch.Tensor | None, dim: int, reverse: bool = False
) -> torch.Tensor:
    """The states token by token, rounded as a model's own loop rounds: products, then sums."""
    dim = _check(factors, inputs, initial, dim)
    states = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    tokens = zip(states.unbind(dim), factors.unbind(dim), inputs.unbind(dim))
    before = initial
    for state, factor, entry in reversed([*tokens]) if reverse else tokens:
        if before is None:
            state.copy_(entry)
        else:
            torch.add(torch.mul(factor, before, out=state), entry, out=state)
        before = state
    return states


def _shapes(
    factors: torch.Tensor, inputs: torch.Tensor, initial: torch.Tensor | None, dim: int, reverse: bool = False
) -> torch.Tensor:
    _check(factors, inputs, initial, dim)
    return torch.empty_like(inputs, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    factors, _, initial, ctx.dim, ctx.reverse = inputs
    ctx.save_for_backward(factors, initial, output)


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Of a state ``g[t] = gradient[t] + factors[t+1] * g[t+1]``, which is that of its input; of a factor, times the
    state before."""
    factors, initial, states = ctx.saved_tensors
    dim = ctx.dim % states.dim()
    if not states.shape[dim]:
        return torch.zeros_like(factors), gradient, None if initial is None else torch.zeros_like(initial), None, None
    first = torch.zeros_like(states.select(dim, 0)) if initial is None else initial
    later = _moved(factors, torch.zeros_like(first), dim, reverse=not ctx.reverse)
    of_inputs = torch.ops.meshwright.linear_recurrence(later, gradient, None, dim, not ctx.reverse)
    of_factors = of_initial = None
    if ctx.needs_input_grad[0]:
        of_factors = of_inputs * _moved(states, first, dim, reverse=ctx.reverse)
    if initial is not None and ctx.needs_input_grad[2]:
        place = states.shape[dim] - 1 if ctx.reverse else 0
        of_initial = factors.select(dim, place) * of_inputs.select(dim, place)
    return of_factors, of_inputs, of_initial, None, None


def _moved(tensor: torch.Tensor, first: torch.Tensor, dim: int, *, reverse: bool) -> torch.Tensor:
    """``tensor`` one token later along ``dim``, behind ``first``; the other way round if ``reverse``."""
    rest = tensor.narrow(dim, 1 if reverse else 0, tensor.shape[dim] - 1)
    parts = (rest, first.unsqueeze(dim)) if reverse else (first.unsqueeze(dim), rest)
    return torch.cat(parts, dim)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("linear_recurrence", one_by_one, _key)
torch.library.register_fake("meshwright::linear_recurrence", _shapes, lib=_LIBRARY)
torch.library.register_autograd("meshwright::linear_recurrence", _gradients, setup_context=_save, lib=_LIBRARY)
