"""Experts against their definition, by ATen operators and by kernels; and the kernels over sorted rows alone."""

from __future__ import annotations

import itertools
import math
import sys
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


@pytest.mark.parametrize("width", [8, 6], ids=["aligned", "rows of 24 bytes"])
@pytest.mark.parametrize("first", [0, 1], ids=["from the start", "from the middle of a buffer"])
@pytest.mark.parametrize("counts", [[2, 0, 4, 1], [0, 0, 0, 0], [9, 0, 0, 0]])
def test_products_of_groups_in_float32_are_those_of_each_group(width: int, first: int, counts: list[int]) -> None:
    def held(*shape: int, seed: int) -> torch.Tensor:
        buffer = random_tensor((math.prod(shape) + first,), seed).float()
        return buffer[first:].view(shape)

    rows, other, matrices = held(9, width, seed=0), held(9, 12, seed=1), held(4, 12, width, seed=2)
    groups = expert_products.ExpertGroups(torch.tensor(counts))
    assert expert_products._is_grouped(rows, matrices) == (width == 8 and first == 0)
    expected, by_group = torch.zeros(9, 12), torch.zeros(4, 12, width)
    for group, places in enumerate(groups.slices):
        expected[places] = rows[places] @ matrices[group].t()
        by_group[group] = other[places].t() @ rows[places]
    assert torch.allclose(expert_products.products(rows, matrices.transpose(1, 2), groups), expected, rtol=1e-6)
    assert torch.allclose(expert_products.outer_products(other, rows, groups), by_group, rtol=1e-6)


def test_without_a_gradient_to_come_experts_make_no_node_and_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([[0, 2], [1, 7], [2, 0], [1, 1]])
    x, scores = random_tensor((4, 8), 0).float(), random_tensor((4, 2), 1).float()
    gate_up, down = random_tensor((3, 24, 8), 2).float(), random_tensor((3, 8, 12), 3).float()
    expected = experts(x.requires_grad_(), ids, scores, gate_up, down)
    assert expected.grad_fn is not None
    nodes: list[object] = []
    function = sys.modules[experts.__module__]._Experts  # type: ignore[attr-defined]
    monkeypatch.setattr(function, "forward", staticmethod(lambda *operands: nodes.append(operands)))
    with torch.no_grad():
        assert torch.equal(experts(x, ids, scores, gate_up, down), expected)
    assert not nodes


def test_choices_without_rows_add_nothing() -> None:
    rows, scores = random_tensor((3, 6), 0), random_tensor((2, 2), 1)
    order = torch.tensor([3, 0, 1, 2])  # the second token's first choice has no row
    expected = torch.stack([rows[1] * scores[0, 0] + rows[2] * scores[0, 1], rows[0] * scores[1, 1]])
    assert torch.allclose(sums_of_choices(rows, order, scores, num_tokens=2), expected, rtol=1e-14)
    assert sums_of_choices(rows[:0], order[:0], None, num_tokens=0).shape == (0, 6)
