"""AdamW over many tensors against torch's, in each implementation."""

from __future__ import annotations

import pytest
import torch

from runtime import kernels
from runtime.kernels.dispatch import VARIABLE
from tests.kernels_harness import IMPLEMENTATIONS, random_tensor

SHAPES = ((3, 5), (), (2100,), (0, 4), (7,), (2, 3, 4))
OPTIONS = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


@pytest.fixture(params=IMPLEMENTATIONS, autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(VARIABLE, request.param)
    return str(request.param)


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(random_tensor(shape, seed).to(dtype)) for seed, shape in enumerate(SHAPES)]


def steps(
    optimizer: torch.optim.Optimizer,
    params: list[torch.nn.Parameter],
    *,
    numbers: range = range(5),
    dtype: torch.dtype | None = None,
) -> None:
    """Step with random gradients; the last parameter has none at first."""
    for number in numbers:
        for place, param in enumerate(params):
            param.grad = None
            if place < len(params) - 1 or number >= 2:
                param.grad = random_tensor(param.shape, 50 * number + place).to(param.dtype)
                if dtype is not None:
                    param.grad_dtype = dtype
                    param.grad = param.grad.to(dtype)
        optimizer.step()


def assert_alike(ours: list[torch.Tensor], theirs: list[torch.Tensor], *, rtol: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=rtol, atol=rtol)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_steps_are_those_of_torch(dtype: torch.dtype, rtol: float) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer, reference = kernels.AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    steps(optimizer, ours)
    steps(reference, theirs)
    assert_alike(ours, theirs, rtol=rtol)
    for one, other in zip(ours, theirs):
        for name, value in reference.state[other].items():
            torch.testing.assert_close(optimizer.state[one][name], value, rtol=rtol, atol=rtol)
