"""The kernels of linear recurrences against a loop, forward and every gradient, in each dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.torch_compat.linear_recurrence import gradients_of, states_of
from runtime.kernels.recurrence import gradients_by_kernel, linear_recurrence, states_by_kernel
from tests.kernels_harness import DTYPES, IMPLEMENTATIONS, check_accuracy, random_tensor

needs_interpreter = pytest.mark.skipif("triton" not in IMPLEMENTATIONS, reason="needs Triton's interpreter")


def loop(
    factors: torch.Tensor, inputs: torch.Tensor, initial: torch.Tensor | None = None, *, dim: int, reverse: bool
) -> torch.Tensor:
    """The definition, by torch's operators."""
    state = torch.zeros_like(inputs.select(dim, 0)) if initial is None else initial
    states = []
    tokens = range(inputs.shape[dim])
    for t in reversed(tokens) if reverse else tokens:
        state = factors.select(dim, t) * state + inputs.select(dim, t)
        states.append(state)
    return torch.stack(states[::-1] if reverse else states, dim=dim)


def drawn(shape: list[int], dim: int, *, begins: bool) -> list[torch.Tensor]:
    factors, inputs = 0.8 * random_tensor(shape, 1).tanh(), random_tensor(shape, 2)
    return [factors, inputs, *([random_tensor([*shape[:dim], *shape[dim + 1 :]], 3)] if begins else [])]


cases = given(
    shape=st.lists(st.sampled_from((1, 2, 5, 9)), min_size=1, max_size=4),
    place=st.integers(0, 3),
    reverse=st.booleans(),
    begins=st.booleans(),
)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15, deadline=None)
@cases
def test_states_and_gradients(dtype: torch.dtype, shape: list[int], place: int, reverse: bool, begins: bool) -> None:
    dim = place % len(shape)
    check_accuracy(
        lambda *tensors: linear_recurrence(*tensors, dim=dim - len(shape), reverse=reverse),
        lambda *tensors: loop(*tensors, dim=dim, reverse=reverse),
        drawn(shape, dim, begins=begins),
        dtype=dtype,
        implementation="aten",
    )


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@settings(max_examples=15, deadline=None)
@cases
def test_kernels_compute_what_the_loop_does(
    dtype: torch.dtype, shape: list[int], place: int, reverse: bool, begins: bool
) -> None:
    dim = place % len(shape)
    factors, inputs, *rest = (tensor.to(dtype) for tensor in drawn(shape, dim, begins=begins))
    initial = rest[0] if rest else None
    # A sum of rounded products, each of which the interpreter may round apart; it cuts bfloat16 off.
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    states = states_of(factors, inputs, initial, dim, reverse)
    assert torch.allclose(
        states_by_kernel(factors, inputs, initial, dim, reverse), states, rtol=tolerance, atol=tolerance
    )
    gradient = random_tensor(shape, 4).to(dtype)
    expected = gradients_of(gradient, factors, states, initial, dim, reverse)
    for one, other in zip(gradients_by_kernel(gradient, factors, states, initial, dim, reverse), expected, strict=True):
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance)


@needs_interpreter
def test_kernels_take_tensors_that_lie_anywhere() -> None:
    factors = random_tensor([3, 1, 4], 1).expand(3, 6, 4)
    inputs = random_tensor([3, 4, 6], 2).transpose(1, 2)
    assert torch.allclose(states_by_kernel(factors, inputs, None, 1), states_of(factors, inputs, None, 1))


def test_no_tokens_give_no_states_and_the_gradients_of_nothing() -> None:
    factors, inputs = (torch.zeros(2, 0, 3, requires_grad=True) for _ in range(2))
    initial = torch.ones(2, 3, requires_grad=True)
    states = linear_recurrence(factors, inputs, initial, dim=1)
    states.sum().backward()
    assert states.shape == (2, 0, 3) and initial.grad is not None and not initial.grad.any()


def test_gradients_that_nobody_needs_are_not_asked_for() -> None:
    inputs = torch.ones(2, 3, requires_grad=True)
    linear_recurrence(torch.full((2, 3), 0.5), inputs, dim=1).sum().backward()
    assert inputs.grad is not None and inputs.grad.tolist() == [[1.75, 1.5, 1.0]] * 2


def test_states_of_narrow_floats_are_rounded_once() -> None:
    factors, inputs = (tensor.bfloat16() for tensor in drawn([2, 40, 3], 1, begins=False))
    exact = linear_recurrence(factors.float(), inputs.float(), dim=1)
    assert torch.equal(linear_recurrence(factors, inputs, dim=1), exact.bfloat16())
