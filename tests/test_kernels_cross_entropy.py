"""Cross-entropy against its definition, in each implementation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import kernels
from tests.kernels_harness import (
    DTYPES,
    IMPLEMENTATIONS,
    Function,
    check_accuracy,
    leading_shapes,
    random_tensor,
    widths,
)

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def random_target(shape: tuple[int, ...], classes: int, seed: int) -> torch.Tensor:
    """Class indices, about a quarter of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, classes, shape, generator=generator)
    return target.masked_fill(torch.rand(shape, generator=generator) < 0.25, -100)


def definition(*, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Function:
    """In torch's operators."""

    def losses(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        flat = logits.reshape(-1, logits.shape[-1])
        plain = F.cross_entropy(flat, target.reshape(-1), reduction="none", label_smoothing=label_smoothing)
        if not z_loss:
            return plain.reshape(target.shape)
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        penalty = z_loss * wide.logsumexp(-1).square() * (target.reshape(-1) != -100)
        return (plain + penalty).reshape(target.shape).to(logits.dtype)

    return losses


@each_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15, deadline=None)
@given(
    shape=leading_shapes | st.just(()),
    width=widths,
    seed=st.integers(0, 9),
    label_smoothing=st.sampled_from((0.0, 0.1, 1.0)),
    z_loss=st.sampled_from((0.0, 1e-2)),
)
def test_cross_entropy(
    implementation: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    width: int,
    seed: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    check_accuracy(
        lambda logits, target: kernels.cross_entropy(logits, target, **options),
        definition(**options),
        [random_tensor((*shape, width), seed, scale=3.0), random_target(shape, width, seed)],
        dtype=dtype,
        implementation=implementation,
    )


@each_implementation
def test_rows_of_several_blocks(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.kernels.logit_rows._MAX_BLOCK", 16)
    monkeypatch.setattr("runtime.kernels.logit_rows._ATEN_BLOCK", 80)
    check_accuracy(
        lambda logits, target: kernels.cross_entropy(logits, target, label_smoothing=0.1),
        definition(label_smoothing=0.1),
        [random_tensor((5, 37), 0, scale=30.0) + torch.arange(37), random_target((5,), 37, 1)],
        dtype=torch.float64,
        implementation=implementation,
    )
