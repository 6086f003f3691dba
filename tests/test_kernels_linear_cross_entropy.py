"""Chunked linear + cross-entropy against its definition, and what it holds in memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import kernels
from tests.kernels_harness import DTYPES, IMPLEMENTATIONS, check_accuracy, leading_shapes, random_tensor, widths
from tests.test_kernels_cross_entropy import definition, random_target


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10, deadline=None)
@given(
    shape=leading_shapes | st.just(()),
    width=widths,
    hidden=st.sampled_from((1, 3, 16)),
    has_bias=st.booleans(),
    chunk_tokens=st.sampled_from((None, 1, 4)),
    seed=st.integers(0, 9),
    label_smoothing=st.sampled_from((0.0, 0.1)),
    z_loss=st.sampled_from((0.0, 1e-2)),
)
def test_linear_cross_entropy(
    implementation: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    width: int,
    hidden: int,
    has_bias: bool,
    chunk_tokens: int | None,
    seed: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    losses = definition(**options)
    tensors = [random_tensor((*shape, hidden), seed), random_tensor((width, hidden), seed + 1)]
    biases = [random_tensor((width,), seed + 2)] if has_bias else []
    check_accuracy(
        lambda x, weight, target, *bias: kernels.linear_cross_entropy(
            x, weight, target, *bias, chunk_tokens=chunk_tokens, **options
        ),
        lambda x, weight, target, *bias: losses(F.linear(x, weight, *bias), target),
        [*tensors, random_target(shape, width, seed), *biases],
        dtype=dtype,
        implementation=implementation,
    )
