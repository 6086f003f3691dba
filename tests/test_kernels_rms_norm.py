"""RMS normalization, with and without a residual, against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import kernels
from tests.kernels_harness import DTYPES, IMPLEMENTATIONS, check_accuracy, leading_shapes, random_tensor, widths

EPS = 1e-5
#: The gradient of a row of one or two nearly cancels, and leaves only rounding to compare.
conditioned_widths = widths.filter(lambda width: width > 2)


def defined(input: torch.Tensor, weight: torch.Tensor | None, offset: float = 0.0) -> torch.Tensor:
    """As models write it: statistics in at least float32, back to the dtype of the input, times the weight."""
    wide = input.double() if input.dtype == torch.float64 else input.float()
    normal = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(input.dtype)
    return normal if weight is None else normal * (weight + offset)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10, deadline=None)
@given(
    shape=leading_shapes,
    width=conditioned_widths,
    seed=st.integers(0, 9),
    offset=st.sampled_from((0.0, 1.0)),
    weighted=st.booleans(),
    added=st.booleans(),
)
def test_rms_norm(
    implementation: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    width: int,
    seed: int,
    offset: float,
    weighted: bool,
    added: bool,
) -> None:
    addends = [random_tensor((*shape, width), seed + place, scale=3.0) for place in range(2 if added else 1)]
    weights = [random_tensor((width,), seed + 5)] if weighted else []

    def fused(*tensors: torch.Tensor) -> object:
        weight = tensors[-1] if weighted else None
        if added:
            return kernels.add_rms_norm(tensors[0], tensors[1], weight, EPS, offset)
        return kernels.rms_norm(tensors[0], weight, EPS, offset)

    def definition(*tensors: torch.Tensor) -> object:
        weight = tensors[-1] if weighted else None
        if added:
            total = tensors[0] + tensors[1]
            return total, defined(total, weight, offset)
        return defined(tensors[0], weight, offset)

    check_accuracy(fused, definition, [*addends, *weights], dtype=dtype, implementation=implementation)
