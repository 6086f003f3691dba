"""Linear recurrences, ``h[t] = a[t] * h[t-1] + b[t]``: one kernel forward, one backward, which read every token once.

A thread holds the state of one element and goes through the tokens; threads side by side read elements side by side.
On a processor, and where Triton is missing or switched off, the states are computed token by token
(``passes.torch_compat.linear_recurrence``, which defines the operators).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from passes.torch_compat.linear_recurrence import checked_dim, gradients_of, states_of
from runtime.kernels.device import common_device, on_device
from runtime.kernels.dispatch import runs_triton
from runtime.kernels.elementwise import wide_type
from runtime.kernels.language import tl, triton

#: Elements of a program, one a thread: few, as there may be no more than some thousands.
_BLOCK, _WARPS = 64, 2
_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")


def linear_recurrence(
    factors: torch.Tensor, inputs: torch.Tensor, initial: torch.Tensor | None = None, *, dim: int, reverse: bool = False
) -> torch.Tensor:
    """All states ``h[t] = factors[t] * h[t-1] + inputs[t]`` along a dim; element by element in the other dims.

    One operator of the graph however many tokens there are, where a loop in Python makes several for each. Computed in
    at least float32. The gradient is the same recurrence in the other direction; it has gradients of any order.

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


@triton.jit
def _states_kernel(  # type: ignore[no-untyped-def]
    factors_ptr, inputs_ptr, initial_ptr, out_ptr, num_elements, num_tokens, num_inner,
    BEGINS: tl.constexpr, REVERSE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tensors are [outer, tokens, inner], the first state [outer, inner]."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = element < num_elements
    place = element // num_inner * (num_tokens * num_inner) + element % num_inner
    step = num_inner
    if REVERSE:
        place += (num_tokens - 1) * num_inner
        step = -num_inner
    state = tl.zeros([BLOCK], dtype=WIDE)
    if BEGINS:
        state = tl.load(initial_ptr + element, mask=exists, other=0.0).to(WIDE)
    for _ in range(num_tokens):
        factor = tl.load(factors_ptr + place, mask=exists, other=0.0).to(WIDE)
        state = factor * state + tl.load(inputs_ptr + place, mask=exists, other=0.0).to(WIDE)
        tl.store(out_ptr + place, state, mask=exists)
        place += step


@triton.jit
def _gradients_kernel(  # type: ignore[no-untyped-def]
    gradient_ptr, factors_ptr, states_ptr, initial_ptr, of_factors_ptr, of_inputs_ptr, num_elements, num_tokens,
    num_inner, BEGINS: tl.constexpr, REVERSE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From the token that came last to the first; ``of_state`` is what the later ones add to a state's gradient."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = element < num_elements
    place = element // num_inner * (num_tokens * num_inner) + element % num_inner
    step = num_inner
    if not REVERSE:
        place += (num_tokens - 1) * num_inner
        step = -num_inner
    first = tl.zeros([BLOCK], dtype=WIDE)
    if BEGINS:
        first = tl.load(initial_ptr + element, mask=exists, other=0.0).to(WIDE)
    of_state = tl.zeros([BLOCK], dtype=WIDE)
    for token in range(num_tokens):
        of_state += tl.load(gradient_ptr + place, mask=exists, other=0.0).to(WIDE)
        is_first = token == num_tokens - 1
        before = tl.load(states_ptr + place + step, mask=exists & (not is_first), other=0.0).to(WIDE)
        before = tl.where(is_first, first, before)
        tl.store(of_inputs_ptr + place, of_state, mask=exists)
        tl.store(of_factors_ptr + place, of_state * before, mask=exists)
        of_state *= tl.load(factors_ptr + place, mask=exists, other=0.0).to(WIDE)
        place += step


def states_by_kernel(
    factors: torch.Tensor, inputs: torch.Tensor, initial: torch.Tensor | None, dim: int, reverse: bool = False
) -> torch.Tensor:
    dim = checked_dim(factors, inputs, initial, dim)
    states = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    _launch(_states_kernel, (factors, inputs), initial, (states,), dim=dim, reverse=reverse)
    return states


def gradients_by_kernel(
    gradient: torch.Tensor,
    factors: torch.Tensor,
    states: torch.Tensor,
    initial: torch.Tensor | None,
    dim: int,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    of_factors, of_inputs = torch.empty_like(states), torch.empty_like(states)
    _launch(_gradients_kernel, (gradient, factors, states), initial, (of_factors, of_inputs), dim=dim, reverse=reverse)
    return of_factors, of_inputs


def _launch(
    kernel: Any,
    inputs: Sequence[torch.Tensor],
    initial: torch.Tensor | None,
    outputs: Sequence[torch.Tensor],
    *,
    dim: int,
    reverse: bool,
) -> None:
    shape = inputs[0].shape
    tokens, inner = shape[dim], math.prod(shape[dim + 1 :])
    elements = math.prod(shape[:dim]) * inner
    if not elements or not tokens:
        return
    first = outputs[0] if initial is None else initial.contiguous()
    kernel[(triton.cdiv(elements, _BLOCK),)](
        *(tensor.contiguous() for tensor in inputs), first, *outputs, elements, tokens, inner,
        BEGINS=initial is not None, REVERSE=reverse, WIDE=wide_type(inputs[0]), BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def _chosen(by_tokens: Callable[..., Any], by_kernel: Callable[..., Any]) -> Callable[..., Any]:
    """An implementation on a GPU."""

    def run(first: torch.Tensor, *arguments: Any) -> Any:
        if not runs_triton(first):
            return by_tokens(first, *arguments)
        tensors = [argument for argument in (first, *arguments) if isinstance(argument, torch.Tensor)]
        with on_device(common_device("linear_recurrence", tensors)):
            return by_kernel(first, *arguments)

    return run


_LIBRARY.impl("linear_recurrence", _chosen(states_of, states_by_kernel), "CUDA")
_LIBRARY.impl("linear_recurrence_gradients", _chosen(gradients_of, gradients_by_kernel), "CUDA")
