"""SwiGLU against its definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import kernels
from tests.kernels_harness import DTYPES, IMPLEMENTATIONS, check_accuracy, leading_shapes, random_tensor, widths


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10, deadline=None)
@given(shape=leading_shapes, width=widths, seed=st.integers(0, 9))
def test_swiglu(implementation: str, dtype: torch.dtype, shape: tuple[int, ...], width: int, seed: int) -> None:
    tensors = [random_tensor((*shape, width), seed + place, scale=3.0) for place in range(2)]
    check_accuracy(
        kernels.swiglu,
        lambda gate, up: F.silu(gate) * up,
        tensors,
        dtype=dtype,
        implementation=implementation,
    )
