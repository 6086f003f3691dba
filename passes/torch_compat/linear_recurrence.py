"""Linear recurrences over a dim of tensors, which torch has no operator of: ``h[t] = a[t] * h[t-1] + b[t]``.

State-space and gated linear recurrent layers are this with other ``a`` and ``b``: the selective scan of Mamba (Gu and
Dao 2023, eq. 2), the RG-LRU of Griffin (De et al. 2024, eq. 4), numerator and denominator of RWKV-4.
"""

from __future__ import annotations

from typing import Any

import torch

LINEAR_RECURRENCE = "meshwright.linear_recurrence.default"
_OF_TENSORS = "Tensor factors, Tensor {}, Tensor? initial, int dim, bool reverse"
_NARROW = (torch.float16, torch.bfloat16)

_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
for _schema in (
    f"linear_recurrence({_OF_TENSORS.format('inputs')}=False) -> Tensor",
    f"linear_recurrence_gradients(Tensor gradient, {_OF_TENSORS.format('states')}) -> (Tensor, Tensor)",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def checked_dim(factors: torch.Tensor, inputs: torch.Tensor, initial: torch.Tensor | None, dim: int) -> int:
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


def states_of(
    factors: torch.Tensor, inputs: torch.Tensor, initial: torch.Tensor | None, dim: int, reverse: bool = False
) -> torch.Tensor:
    """The states token by token, rounded as a model's own loop rounds: products, then sums; in at least float32."""
    dim = checked_dim(factors, inputs, initial, dim)
    if inputs.dtype in _NARROW:
        begins = None if initial is None else initial.float()
        return states_of(factors.float(), inputs.float(), begins, dim, reverse).to(inputs.dtype)
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


def gradients_of(
    gradient: torch.Tensor,
    factors: torch.Tensor,
    states: torch.Tensor,
    initial: torch.Tensor | None,
    dim: int,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of factors and inputs, by the operator itself.

    That of a state, ``g[t] = gradient[t] + factors[t+1] * g[t+1]``, is that of its input; a factor's is that times the
    state before.
    """
    first = torch.zeros_like(states.select(dim, 0)) if initial is None else initial
    later = _moved(factors, torch.zeros_like(first), dim, reverse=not reverse)
    of_inputs = torch.ops.meshwright.linear_recurrence(later, gradient, None, dim, not reverse)
    return of_inputs * _moved(states, first, dim, reverse=reverse), of_inputs


def _moved(tensor: torch.Tensor, first: torch.Tensor, dim: int, *, reverse: bool) -> torch.Tensor:
    """``tensor`` one token later along ``dim``, behind ``first``; the other way round if ``reverse``."""
    rest = tensor.narrow(dim, 1 if reverse else 0, tensor.shape[dim] - 1)
    parts = (rest, first.unsqueeze(dim)) if reverse else (first.unsqueeze(dim), rest)
    return torch.cat(parts, dim)


def _shapes(
    factors: torch.Tensor, inputs: torch.Tensor, initial: torch.Tensor | None, dim: int, reverse: bool = False
) -> torch.Tensor:
    checked_dim(factors, inputs, initial, dim)
    return torch.empty_like(inputs, memory_format=torch.contiguous_format)


def _shapes_of_gradients(gradient: torch.Tensor, factors: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    of_factors, of_inputs = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (factors, gradient)
    )
    return of_factors, of_inputs


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    factors, _, initial, ctx.dim, ctx.reverse = inputs
    ctx.save_for_backward(factors, initial, output)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    factors, initial, states = ctx.saved_tensors
    dim, reverse = ctx.dim % states.dim(), ctx.reverse
    if not states.shape[dim]:
        return torch.zeros_like(factors), gradient, None if initial is None else torch.zeros_like(initial), None, None
    # One that is differentiated again is made of operators that have a gradient.
    again = torch.is_grad_enabled()
    compute = gradients_of if again else torch.ops.meshwright.linear_recurrence_gradients
    of_factors, of_inputs = compute(gradient, factors, states, initial, dim, reverse)
    of_initial = None
    if initial is not None and ctx.needs_input_grad[2]:
        place = states.shape[dim] - 1 if reverse else 0
        of_initial = factors.select(dim, place) * of_inputs.select(dim, place)
    return of_factors, of_inputs, of_initial, None, None


# On a GPU both are kernels (``runtime.kernels.recurrence``).
_LIBRARY.impl("linear_recurrence", states_of, "CPU")
_LIBRARY.impl("linear_recurrence_gradients", gradients_of, "CPU")
torch.library.register_fake("meshwright::linear_recurrence", _shapes, lib=_LIBRARY)
torch.library.register_fake("meshwright::linear_recurrence_gradients", _shapes_of_gradients, lib=_LIBRARY)
torch.library.register_autograd("meshwright::linear_recurrence", _backward, setup_context=_save, lib=_LIBRARY)
