"""Experts against their definition, by ATen operators and by kernels; and the kernels over sorted rows alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch

from runtime.kernels import expert_products, grouped_matmul
from runtime.kernels.dispatch import VARIABLE
from runtime.kernels.expert_activations import ACTIVATIONS
from runtime.kernels.expert_row_kernels import clear_rows_behind, sums_of_choices
from runtime.kernels.experts import experts
from tests.cells import cells
from tests.kernels_harness import IMPLEMENTATIONS, random_tensor

#: Activations with kernels of their own, and one without.
KINDS = ("swiglu", "geglu", "geglu_tanh", "swiglu_clamped", "relu2")
NUM_EXPERTS, HIDDEN = 3, 5


def definition(activation: str, ids: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Every expert on every token, by operators that autograd differentiates."""

    def compute(
        x: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *biases: torch.Tensor
    ) -> torch.Tensor:
        result = torch.zeros_like(x)
        for expert in range(NUM_EXPERTS):
            hidden = x @ gate_up[expert].T + (biases[0][expert] if biases else 0.0)
            output = ACTIVATIONS[activation].definition(hidden) @ down[expert].T
            output = output + (biases[1][expert] if biases else 0.0)
            result = result + output * (scores * (ids == expert)).sum(1, keepdim=True)
        return result

    return compute


#: Tokens, experts of each, width of inner vectors (the last is of two blocks of a kernel), whether there are biases.
SIZES = [(0, 2, 8, False), (1, 1, 1, True), (7, 4, 33, True), (5, 2, 1030, False)]
#: Roundings, in units of the last place of the largest number, that a chain of two products and an activation makes.
ROUNDINGS = 32


DTYPES = (torch.float64, torch.float32, torch.bfloat16)
EVERY = tuple(itertools.product(KINDS, DTYPES, IMPLEMENTATIONS))
#: Every two values together.
PAIRS = tuple(
    (kind, dtype, IMPLEMENTATIONS[(row + column) % len(IMPLEMENTATIONS)])
    for row, kind in enumerate(KINDS)
    for column, dtype in enumerate(DTYPES)
)


@pytest.mark.parametrize(
    ("activation", "dtype", "implementation"), cells(PAIRS, [cell for cell in EVERY if cell not in PAIRS]), ids=str
)
def test_experts_are_as_exact_as_their_definition(
    activation: str, dtype: torch.dtype, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, implementation)
    for num_tokens, k, inner, biased in SIZES:
        ids = torch.randint(-1, NUM_EXPERTS + 1, (num_tokens, k), generator=torch.Generator().manual_seed(k))
        outer = inner * ACTIVATIONS[activation].halves
        # Tokens so large that the clamped activation clamps.
        shapes = [((num_tokens, HIDDEN), 3.0), ((num_tokens, k), 1.0), ((NUM_EXPERTS, outer, HIDDEN), 0.5)]
        shapes += [((NUM_EXPERTS, HIDDEN, inner), inner**-0.5)]
        shapes += [((NUM_EXPERTS, outer), 1.0), ((NUM_EXPERTS, HIDDEN), 1.0)] if biased else []
        tensors = [random_tensor(shape, place, scale=scale).to(dtype) for place, (shape, scale) in enumerate(shapes)]
        ours = _results(lambda x, scores, *rest: experts(x, ids, scores, *rest, activation=activation), tensors)  # noqa: B023
        truth = _results(definition(activation, ids), [tensor.double() for tensor in tensors])
        for place, (one, exact) in enumerate(zip(ours, truth, strict=True)):
            assert one.shape == exact.shape and one.dtype == dtype
            allowed = ROUNDINGS * torch.finfo(dtype).eps * float(exact.abs().max()) if exact.numel() else 0.0
            assert torch.allclose(one.double(), exact, rtol=0.0, atol=allowed), (num_tokens, place)


def _results(function: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, random_tensor(output.shape, 99).to(output.dtype))]


@pytest.mark.parametrize("end", [0, 1, 17, 40, 41])
def test_rows_behind_an_end_are_cleared_and_no_others(end: int) -> None:
    rows = random_tensor((41, 3), 0)
    expected = rows.clone()
    expected[end:] = 0.0
    clear_rows_behind(rows, torch.tensor([end], dtype=torch.int32))
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("module", [expert_products, grouped_matmul])
def test_a_product_of_groups_on_a_gpu_clears_the_rows_that_no_kernel_writes(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setattr(expert_products, "_is_grouped", lambda *operands: True)
    monkeypatch.setattr(grouped_matmul, "_has_kernel", lambda *operands: True)
    monkeypatch.setattr(module.F, "grouped_mm", lambda rows, *_, **__: torch.full_like(rows, torch.nan))
    rows, matrices, counts = torch.ones(5, 4), torch.ones(3, 4, 4), torch.tensor([2, 0, 1])
    if module is expert_products:
        result = expert_products.products(rows, matrices, expert_products.ExpertGroups(counts))
    else:
        result = grouped_matmul.grouped_matmul(rows, matrices, counts.cumsum(0).to(torch.int32))
    assert result.isnan().all(1).tolist() == [True, True, True, False, False]
    assert not result[3:].any()


def test_choices_without_rows_add_nothing() -> None:
    rows, scores = random_tensor((3, 6), 0), random_tensor((2, 2), 1)
    order = torch.tensor([3, 0, 1, 2])  # the second token's first choice has no row
    expected = torch.stack([rows[1] * scores[0, 0] + rows[2] * scores[0, 1], rows[0] * scores[1, 1]])
    assert torch.allclose(sums_of_choices(rows, order, scores, num_tokens=2), expected, rtol=1e-14)
    assert sums_of_choices(rows[:0], order[:0], None, num_tokens=0).shape == (0, 6)
