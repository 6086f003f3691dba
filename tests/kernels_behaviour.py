"""What every fused operator must stand, whatever it computes: compilers, autocast, layouts, fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from runtime.kernels.dispatch import VARIABLE
from tests.kernels_harness import Function


def check_behaviour(function: Function, operator: Any, arguments: Sequence[Any]) -> None:
    """Compiled, registered and on meta tensors as when called: ``operator`` is what ``function`` calls."""
    check_compiles(function, arguments)
    check_meta(function, arguments)
    torch.library.opcheck(operator, tuple(_leaf(argument) for argument in arguments))


def check_compiles(function: Function, arguments: Sequence[Any]) -> None:
    """One graph, without breaks, and the same results and gradients."""
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(_results(compiled, arguments), _results(function, arguments), rtol=0, atol=0)


def check_meta(function: Function, arguments: Sequence[Any]) -> None:
    """Shapes, dtypes and layouts are known without computing."""
    real = _results(function, arguments)
    meta = _results(function, [_to_meta(argument) for argument in arguments])
    for one, other in zip(real, meta, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def check_autocast(function: Function, definition: Function, arguments: Sequence[Any]) -> None:
    """Under autocast the dtypes are those of ``definition``, which is spelled with torch's own operators."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = _results(function, arguments), _results(definition, arguments)
    assert [one.dtype for one in ours] == [one.dtype for one in theirs]
    # bfloat16 holds 2-3 digits, and the definition rounds after every operator where the fused one rounds once
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


def check_layouts(
    function: Function, arguments: Sequence[Any], others: Sequence[Any], implementations: Sequence[str]
) -> None:
    """``others`` are the same values laid out otherwise: the same results."""
    for implementation in implementations:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, implementation)
            # torch's vectorised and scalar code round float32 differently
            torch.testing.assert_close(_results(function, others), _results(function, arguments), rtol=1e-5, atol=1e-5)


def _leaf(argument: Any) -> Any:
    """Its own memory would lose its layout: a view of a detached tensor keeps it."""
    differentiable = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return argument.detach().requires_grad_() if differentiable else argument


def _to_meta(argument: Any) -> Any:
    return argument.to("meta") if isinstance(argument, torch.Tensor) else argument


def _results(function: Function, arguments: Sequence[Any]) -> list[torch.Tensor]:
    """Outputs, and gradients of all that have one, for gradients of one."""
    leaves = [_leaf(argument) for argument in arguments]
    results = function(*leaves)
    outputs = list(results) if isinstance(results, (list, tuple)) else [results]
    trained = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, trained, [torch.ones_like(output) for output in outputs])]
