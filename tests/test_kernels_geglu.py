"""GeGLU against its definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import kernels
from tests.kernels_behaviour import check_autocast, check_behaviour, check_layouts
from tests.kernels_harness import DTYPES, IMPLEMENTATIONS, check_accuracy, leading_shapes, random_tensor, widths

approximations = pytest.mark.parametrize("approximate", ("none", "tanh"))


def _definition(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return F.gelu(gate, approximate=approximate) * up


@approximations
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8, deadline=None)
@given(shape=leading_shapes, width=widths, seed=st.integers(0, 9))
def test_geglu(
    approximate: str, implementation: str, dtype: torch.dtype, shape: tuple[int, ...], width: int, seed: int
) -> None:
    tensors = [random_tensor((*shape, width), seed + place, scale=3.0) for place in range(2)]
    check_accuracy(
        lambda gate, up: kernels.geglu(gate, up, approximate),
        lambda gate, up: _definition(gate, up, approximate),
        tensors,
        dtype=dtype,
        implementation=implementation,
    )


@approximations
def test_halves_of_one_projection(approximate: str) -> None:
    halves = random_tensor((2, 3, 600), 0).float().chunk(2, dim=-1)
    straight = [half.contiguous() for half in halves]
    check_layouts(kernels.geglu, [*straight, approximate], [*halves, approximate], IMPLEMENTATIONS)


@approximations
def test_behaviour(approximate: str) -> None:
    arguments = [*random_tensor((2, 3, 10), 0).float().chunk(2, dim=-1), approximate]
    check_behaviour(kernels.geglu, torch.ops.meshwright.geglu.default, arguments)
    check_autocast(kernels.geglu, _definition, arguments)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"approximate='erf': expected one of 'none', 'tanh'"):
        kernels.geglu(torch.ones(3), torch.ones(3), "erf")
    with pytest.raises(ValueError, match=r"expected one shape"):
        kernels.geglu(torch.ones(2, 3), torch.ones(3))
