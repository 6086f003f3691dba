"""Rows a block at a time: the same numbers, and no more of them at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime.kernels import row_blocks
from runtime.kernels.experts import experts
from runtime.kernels.row_blocks import in_row_blocks


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_blocks, "BLOCK", 64)


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 33])
@pytest.mark.usefixtures("small_blocks")
def test_blocks_have_as_many_elements_as_said(rows: int) -> None:
    seen: list[int] = []

    def double(left: Tensor, right: Tensor) -> Tensor:
        seen.append(len(left))
        return left * right

    operands = torch.randn(rows, 16), torch.randn(rows, 1)
    assert torch.equal(in_row_blocks(double, *operands), operands[0] * operands[1])
    assert sum(seen) == rows and max(seen) <= 4


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_clamped", "glu", "reglu", "relu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_experts_are_the_same_in_blocks(activation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    halves = 1 if activation == "relu" else 2
    torch.manual_seed(0)
    shapes = [(13, 8), (13, 2), (3, 6 * halves, 8), (3, 8, 6), (3, 6 * halves), (3, 8)]
    x, scores, *weights = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    ids = torch.randint(0, 4, (13, 2))  # 3: no expert

    def results() -> list[Tensor]:
        output = experts(x, ids, scores, *weights, activation=activation)
        return [output, *torch.autograd.grad(output.square().sum(), [x, scores, *weights])]

    whole = results()
    monkeypatch.setattr(row_blocks, "BLOCK", 40)
    assert all(torch.equal(one, other) for one, other in zip(whole, results(), strict=True))
