"""GELU of an input and a bias against its definition."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from runtime import kernels
from tests.kernels_behaviour import check_autocast, check_behaviour, check_layouts
from tests.kernels_harness import DTYPES, IMPLEMENTATIONS, check_accuracy, leading_shapes, random_tensor, widths

approximations = pytest.mark.parametrize("approximate", ("none", "tanh"))


def _definition(input: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return F.gelu(input + bias, approximate=approximate)


def _tensors(shape: tuple[int, ...], *, scale: float = 1.0) -> list[torch.Tensor]:
    return [random_tensor(shape, 0, scale=scale), random_tensor(shape[-1:], 1)]


@approximations
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8, deadline=None)
@given(shape=leading_shapes, width=widths)
def test_bias_gelu(
    approximate: str, implementation: str, dtype: torch.dtype, shape: tuple[int, ...], width: int
) -> None:
    check_accuracy(
        lambda input, bias: kernels.bias_gelu(input, bias, approximate),
        lambda input, bias: _definition(input, bias, approximate),
        _tensors((*shape, width), scale=3.0),
        dtype=dtype,
        implementation=implementation,
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", ((5,), (100, 3)))
def test_one_row_and_many(implementation: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["runtime.kernels.bias_gelu"], "_MOST_SHARES", 3)
    check_accuracy(kernels.bias_gelu, _definition, _tensors(shape), dtype=torch.float64, implementation=implementation)


@approximations
def test_layouts_give_the_same(approximate: str) -> None:
    input, bias = (tensor.float() for tensor in _tensors((2, 3, 30)))
    straight = [input, bias, approximate]
    part = torch.cat((input, input), dim=-1)[..., :30]
    turned = input.transpose(0, 2).contiguous().transpose(0, 2)
    spread = torch.stack((bias, bias), dim=-1)[:, 0]
    for others in ([part, bias, approximate], [turned, spread, approximate]):
        check_layouts(kernels.bias_gelu, straight, others, IMPLEMENTATIONS)


@approximations
def test_behaviour(approximate: str) -> None:
    arguments = [*(tensor.float() for tensor in _tensors((2, 3, 10))), approximate]
    check_behaviour(kernels.bias_gelu, torch.ops.meshwright.bias_gelu.default, arguments)
    check_autocast(kernels.bias_gelu, _definition, arguments)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"approximate='erf': expected one of 'none', 'tanh'"):
        kernels.bias_gelu(torch.ones(3), torch.ones(3), "erf")
    with pytest.raises(ValueError, match=r"bias is \(2,\) and the input \(2, 3\): expected a bias"):
        kernels.bias_gelu(torch.ones(2, 3), torch.ones(2))
