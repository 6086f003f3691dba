"""Rows that each take the weight of their expert, against gathered weights."""

from __future__ import annotations

import pytest
import torch

from runtime import kernels
from tests.kernels_harness import DTYPES, check_accuracy, random_tensor

IDS = torch.tensor([[2, 0], [2, 3], [0, 7], [-1, 2]])
#: Leading dims of the rows: one for each choice of an expert, or one for each token, which all its experts read.
LEADS = ((4, 2), (4, 1))


def gathered(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A weight for each row; zero for ids of no expert."""
    exists = (IDS >= 0) & (len(weight) > IDS)
    products = torch.einsum("tki,tkoi->tko", rows.expand(4, 2, -1), weight[IDS.where(exists, 0)])
    return torch.where(exists.unsqueeze(-1), products, 0.0)


def fused(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return kernels.expert_linear(rows, IDS, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", LEADS)
def test_is_the_product_with_gathered_weights(dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    tensors = [random_tensor((*lead, 8), 0), random_tensor((5, 3, 8), 1)]
    check_accuracy(fused, gathered, tensors, dtype=dtype, implementation="aten")


def test_transposed_weights_are_read_where_they_lie() -> None:
    rows, weight = random_tensor((4, 2, 8), 0), random_tensor((5, 8, 3), 1)
    strided, packed = weight.transpose(1, 2), weight.transpose(1, 2).contiguous()
    torch.testing.assert_close(kernels.expert_linear(rows, IDS, strided), kernels.expert_linear(rows, IDS, packed))


def test_second_derivatives() -> None:
    tensors = [random_tensor(shape, 2).requires_grad_() for shape in ((4, 1, 3), (5, 2, 3))]
    assert torch.autograd.gradgradcheck(fused, tensors)


def test_no_rows() -> None:
    ids = torch.empty((0, 2), dtype=torch.int64)
    assert kernels.expert_linear(torch.ones(0, 2, 3), ids, torch.ones(5, 4, 3)).shape == (0, 2, 4)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \[\.\.\., in\] and \[experts, out, in\]"):
        kernels.expert_linear(torch.ones(4, 2, 3), IDS, torch.ones(5, 3, 4))
    with pytest.raises(ValueError, match="one dtype for input and weight"):
        kernels.expert_linear(torch.ones(4, 2, 3), IDS, torch.ones(5, 4, 3).double())
