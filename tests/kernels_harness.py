"""Hold a fused operator against its definition in float64: forward and every gradient, in each implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from runtime.kernels.dispatch import VARIABLE
from runtime.kernels.language import has_triton, interprets_triton

#: Implementations that run on this machine: kernels on a processor run in Triton's interpreter (see ``conftest``).
IMPLEMENTATIONS = ("aten", *(("triton",) if has_triton() and interprets_triton() else ()))
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: Small and odd, with empty ones.
leading_shapes = st.lists(st.sampled_from((0, 1, 2, 3, 5)), min_size=1, max_size=3).map(tuple)
widths = st.sampled_from((1, 2, 7, 16, 33, 130))

Function = Callable[..., Any]
#: Triton's interpreter cuts bfloat16 off where a GPU rounds it.
_ROUNDINGS = {"aten": 1.0, "triton": 2.0}


def random_tensor(shape: Sequence[int], seed: int, *, scale: float = 1.0) -> torch.Tensor:
    """float64, normally distributed."""
    return torch.randn(tuple(shape), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * scale


def check_accuracy(
    fused: Function, definition: Function, tensors: Sequence[torch.Tensor], *, dtype: torch.dtype, implementation: str
) -> None:
    """``fused`` in ``dtype`` is as close to ``definition`` in float64 as that is in ``dtype``, but for one rounding.

    Args:
        fused, definition: take the tensors, give a tensor or several.
        tensors: float64; gradients are compared for those of floating point, all at the values that ``dtype`` holds.
    """
    cast = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors]
    exact = _run(definition, [tensor.double() if tensor.is_floating_point() else tensor for tensor in cast])
    eager = _run(definition, cast)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, implementation)
        ours = _run(fused, cast)
    assert len(ours) == len(exact)
    for place, (one, other, truth) in enumerate(zip(ours, eager, exact, strict=True)):
        assert one.shape == truth.shape, f"result {place}: {tuple(one.shape)}, expected {tuple(truth.shape)}"
        assert one.dtype == other.dtype, f"result {place}: {one.dtype}, expected {other.dtype}"
        # Nothing is more exact than float64: there, both round a few times, also terms of about one that cancel.
        roundings, least = (16.0, 1.0) if dtype == torch.float64 else (_ROUNDINGS[implementation], 0.0)
        allowed = _error(other, truth) + roundings * torch.finfo(dtype).eps * max(_largest(truth), least)
        assert _error(one, truth) <= allowed, f"result {place} is off by {_error(one, truth):.3g}, above {allowed:.3g}"


def _run(function: Function, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs, and the gradients of every floating-point tensor for fixed random gradients of the outputs."""
    leaves = [tensor.detach().clone() for tensor in tensors]
    trained = [leaf.requires_grad_() for leaf in leaves if leaf.is_floating_point()]
    results = function(*leaves)
    outputs = list(results) if isinstance(results, (list, tuple)) else [results]
    grads = [random_tensor(output.shape, 100 + place).to(output.dtype) for place, output in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, trained, grads)]


def _error(one: torch.Tensor, truth: torch.Tensor) -> float:
    return float((one.detach().double() - truth).abs().max()) if truth.numel() else 0.0


def _largest(truth: torch.Tensor) -> float:
    return float(truth.abs().max()) if truth.numel() else 0.0
