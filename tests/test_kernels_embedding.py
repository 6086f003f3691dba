"""Embedding and its gradient against PyTorch's."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import kernels
from tests.kernels_behaviour import check_autocast, check_behaviour, check_layouts
from tests.kernels_harness import DTYPES, IMPLEMENTATIONS, check_accuracy, random_tensor

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def _indices(shape: tuple[int, ...], num_rows: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randint(num_rows, shape, generator=torch.Generator().manual_seed(seed))


def _check(
    indices: torch.Tensor, weight: torch.Tensor, padding_idx: int | None, dtype: torch.dtype, implementation: str
) -> None:
    check_accuracy(
        lambda weight: kernels.embedding(indices, weight, padding_idx),
        lambda weight: F.embedding(indices, weight, padding_idx),
        [weight],
        dtype=dtype,
        implementation=implementation,
    )


@implementations
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8, deadline=None)
@given(
    shape=st.lists(st.sampled_from((0, 1, 3, 11)), max_size=2).map(tuple),
    num_rows=st.sampled_from((1, 4, 50)),
    width=st.sampled_from((1, 6, 33)),
    padding_idx=st.sampled_from((None, 0, -1)),
    small=st.booleans(),
)
def test_embedding(
    implementation: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    num_rows: int,
    width: int,
    padding_idx: int | None,
    small: bool,
) -> None:
    indices = _indices(shape, num_rows)
    weight = random_tensor((num_rows, width), 1)
    _check(indices.int() if small else indices, weight, padding_idx, dtype, implementation)


@implementations
@pytest.mark.parametrize("chunk", (2, 8))
@pytest.mark.parametrize("padding_idx", (None, 1))
@pytest.mark.parametrize("num_rows", (1, 2, 3, 9))
def test_runs_of_every_length(
    implementation: str, chunk: int, padding_idx: int | None, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs within a chunk, over its end, over several chunks, and over more than are added at a time."""
    module = sys.modules["runtime.kernels.embedding"]
    monkeypatch.setattr(module, "_CHUNK", chunk)
    monkeypatch.setattr(module, "_TILE", 8)
    indices = _indices((67,), num_rows).square() // num_rows
    _check(indices, random_tensor((max(num_rows, 2), 4), 1), padding_idx, torch.float64, implementation)


@implementations
def test_wide_rows(implementation: str) -> None:
    _check(_indices((5,), 3), random_tensor((3, 1100), 1), None, torch.float64, implementation)


def test_frequent_indices_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    indices = torch.zeros(700, dtype=torch.int64)
    for implementation in IMPLEMENTATIONS:
        monkeypatch.setenv("MESHWRIGHT_KERNELS", implementation)
        weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
        kernels.embedding(indices, weight).sum().backward()
        assert weight.grad is not None
        assert abs(weight.grad[0].item() - 700) <= 4


def test_only_indices_are_kept() -> None:
    saved_dtypes: list[torch.dtype] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved_dtypes.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kernels.embedding(_indices((4,), 3), torch.ones(3, 2, requires_grad=True))
    assert saved_dtypes == [torch.int64]


def test_layouts_give_the_same() -> None:
    indices, weight = _indices((3, 7), 5), random_tensor((5, 6), 1).float()
    turned = [indices.T.contiguous().T, weight.T.contiguous().T]
    check_layouts(kernels.embedding, [indices, weight], turned, IMPLEMENTATIONS)


@implementations
def test_gradients_laid_out_otherwise(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_KERNELS", implementation)
    indices, weight = _indices((3, 7), 5), random_tensor((5, 6), 1).requires_grad_()
    grad = random_tensor((3, 7, 6), 2)
    results = [
        torch.autograd.grad(kernels.embedding(indices, weight), [weight], one)[0]
        for one in (grad, grad.transpose(0, 2).contiguous().transpose(0, 2), torch.cat((grad, grad), -1)[..., :6])
    ]
    torch.testing.assert_close(results[1:], [results[0]] * 2)


def test_behaviour() -> None:
    arguments = [_indices((3, 7), 5), random_tensor((5, 6), 1).float(), 2]
    check_behaviour(kernels.embedding, torch.ops.meshwright.embedding.default, arguments)
    check_autocast(kernels.embedding, F.embedding, arguments)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"padding_idx=5: expected a row of the weight, -5 to 4"):
        kernels.embedding(_indices((3,), 5), torch.ones(5, 2), 5)
    with pytest.raises(ValueError, match=r"weight is \(5,\): expected \[count, width\]"):
        kernels.embedding(_indices((3,), 5), torch.ones(5))
