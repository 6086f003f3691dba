"""Layer normalization, with and without a residual, against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import kernels
from tests.kernels_harness import DTYPES, IMPLEMENTATIONS, check_accuracy, leading_shapes, random_tensor, widths

EPS = 1e-5
#: The gradient of a row of one or two nearly cancels, and leaves only rounding to compare.
conditioned_widths = widths.filter(lambda width: width > 2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10, deadline=None)
@given(
    shape=leading_shapes,
    width=conditioned_widths,
    seed=st.integers(0, 9),
    weighted=st.booleans(),
    biased=st.booleans(),
    added=st.booleans(),
)
def test_layer_norm(
    implementation: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    width: int,
    seed: int,
    weighted: bool,
    biased: bool,
    added: bool,
) -> None:
    addends = [random_tensor((*shape, width), seed + place, scale=3.0) for place in range(2 if added else 1)]
    parameters = [random_tensor((width,), seed + 5 + place) for place in range(weighted + biased)]

    def arguments(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return (tensors[len(addends)] if weighted else None), (tensors[-1] if biased else None)

    def fused(*tensors: torch.Tensor) -> object:
        if added:
            return kernels.add_layer_norm(tensors[0], tensors[1], *arguments(tensors), EPS)
        return kernels.layer_norm(tensors[0], *arguments(tensors), EPS)

    def definition(*tensors: torch.Tensor) -> object:
        total = tensors[0] + tensors[1] if added else tensors[0]
        normal = F.layer_norm(total, (width,), *arguments(tensors), EPS)
        return (total, normal) if added else normal

    check_accuracy(fused, definition, [*addends, *parameters], dtype=dtype, implementation=implementation)
