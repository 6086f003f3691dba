"""SwiGLU against its definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import kernels
from tests.kernels_behaviour import check_autocast, check_behaviour, check_layouts
from tests.kernels_harness import DTYPES, IMPLEMENTATIONS, check_accuracy, leading_shapes, random_tensor, widths


def _definition(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10, deadline=None)
@given(shape=leading_shapes, width=widths, seed=st.integers(0, 9))
def test_swiglu(implementation: str, dtype: torch.dtype, shape: tuple[int, ...], width: int, seed: int) -> None:
    tensors = [random_tensor((*shape, width), seed + place, scale=3.0) for place in range(2)]
    check_accuracy(kernels.swiglu, _definition, tensors, dtype=dtype, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dtypes_promote(implementation: str) -> None:
    tensors = [random_tensor((3, 40), seed) for seed in range(2)]
    check_accuracy(
        lambda gate, up: kernels.swiglu(gate, up.float()),
        lambda gate, up: _definition(gate, up.float()),
        tensors,
        dtype=torch.float64,
        implementation=implementation,
    )


@pytest.mark.parametrize("size", (4, 2000))
def test_layouts_give_the_same(size: int) -> None:
    packed = random_tensor((2, 3, 2 * size), 0).float()
    halves = packed.chunk(2, dim=-1)
    straight = [half.contiguous() for half in halves]
    turned = [half.transpose(0, 2).contiguous().transpose(0, 2) for half in halves]
    check_layouts(kernels.swiglu, straight, halves, IMPLEMENTATIONS)
    check_layouts(kernels.swiglu, straight, turned, IMPLEMENTATIONS)
    check_layouts(kernels.swiglu, straight, [straight[0], halves[1]], IMPLEMENTATIONS)


def test_numbers_without_dims() -> None:
    tensors = [random_tensor((1,), seed)[0] for seed in range(2)]
    for implementation in IMPLEMENTATIONS:
        check_accuracy(kernels.swiglu, _definition, tensors, dtype=torch.float64, implementation=implementation)


def test_behaviour() -> None:
    packed = random_tensor((2, 3, 10), 0).float()
    check_behaviour(kernels.swiglu, torch.ops.meshwright.swiglu.default, packed.chunk(2, dim=-1))
    check_autocast(kernels.swiglu, _definition, packed.chunk(2, dim=-1))


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gate is \(2, 3\) and up \(3,\): expected one shape"):
        kernels.swiglu(torch.ones(2, 3), torch.ones(3))
