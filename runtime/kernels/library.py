"""How a fused operator is registered with torch: schema, implementations, shapes, gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from runtime.kernels.dispatch import runs_triton

NAMESPACE = "meshwright"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def register(
    schema: str, *, aten: Callable[..., Any], triton: Callable[..., Any], shapes: Callable[..., Any]
) -> torch._ops.OpOverload:
    """Define ``torch.ops.meshwright.<name>``; which implementation runs is decided at each call, by the first tensor.

    Args:
        schema: ``"swiglu(Tensor gate, Tensor up) -> Tensor"``.
        aten: the operator as torch operators; also runs on subclasses and in modes, rank by rank.
        triton: the same as kernels.
        shapes: gives outputs of the right shape and dtype without computing (the fake implementation).
    """
    name = schema.partition("(")[0]

    def run(*args: Any, **kwargs: Any) -> Any:
        first = next(argument for argument in args if isinstance(argument, torch.Tensor))
        return (triton if runs_triton(first) else aten)(*args, **kwargs)

    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CPU")
    _LIBRARY.impl(name, run, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=_LIBRARY)
    operator: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return operator


def differentiable(operator: torch._ops.OpOverload, *, save: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Give ``operator`` its gradient.

    Args:
        save: ``save(ctx, inputs, output)`` keeps for backward what that needs, as little as it can.
        backward: ``backward(ctx, *grads)`` gives the gradient of every input (None for those without), by calling
            operators of this library, so that a compiler sees one call.
    """
    torch.library.register_autograd(operator, backward, setup_context=save, lib=_LIBRARY)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In at least float32, as every fused operator computes."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def wide_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """The type in which a fused operator computes: that to which its operands promote, but at least float32."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
