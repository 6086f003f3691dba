"""How a fused operator is registered with torch: schema, implementations, shapes, gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from runtime.kernels.device import common_device, on_device
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

    run = _dispatched(name, aten=aten, triton=triton)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CPU")
    _LIBRARY.impl(name, run, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=_LIBRARY)
    operator: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return operator


def _dispatched(name: str, *, aten: Callable[..., Any], triton: Callable[..., Any]) -> Callable[..., Any]:
    """``aten`` or ``triton``, by the first tensor; kernels run on the device of the tensors."""

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
        if not runs_triton(tensors[0]):
            return aten(*args, **kwargs)
        with on_device(common_device(name, tensors)):
            return triton(*args, **kwargs)

    return run


def differentiable(operator: torch._ops.OpOverload, *, save: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Give ``operator`` its gradient.

    Args:
        save: ``save(ctx, inputs, output)`` keeps for backward what that needs, as little as it can.
        backward: ``backward(ctx, *grads)`` gives the gradient of every input (None for those without), by calling
            operators of this library, so that a compiler sees one call.
    """
    torch.library.register_autograd(operator, backward, setup_context=save, lib=_LIBRARY)


def differentiable_again(operator: torch._ops.OpOverload, plain: Callable[..., Any]) -> None:
    """Give a ``<name>_backward`` operator a gradient of its own, so that derivatives of any order are right.

    It is that of ``plain``, which is run again: second derivatives are rare, and may cost what torch's operators do.

    Args:
        plain: takes the operator's arguments and gives its outputs (None for those that nobody wants) by operators of
            torch alone, with whatever they depend on computed from the arguments; see ``gradients_of``.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = [given if isinstance(given, torch.Tensor) else None for given in inputs]
        ctx.save_for_backward(*tensors)
        ctx.constants = [None if isinstance(given, torch.Tensor) else given for given in inputs]
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            given = [_apart(tensor, again=again) for tensor in ctx.saved_tensors]
            arguments = [constant if tensor is None else tensor for tensor, constant in zip(given, ctx.constants)]
            results = plain(*arguments)
            results = results if isinstance(results, tuple) else (results,)
            pairs = [
                (result, grad)
                for result, grad in zip(results, grads, strict=True)
                if result is not None and grad is not None and result.requires_grad
            ]
            wanted = [tensor for tensor in given if tensor is not None and tensor.requires_grad]
            outputs, upstream = [result for result, _ in pairs], [grad for _, grad in pairs]
            found = iter(
                torch.autograd.grad(outputs, wanted, upstream, create_graph=again, allow_unused=True)
                if pairs
                else [None] * len(wanted)
            )
        return tuple(None if tensor is None or not tensor.requires_grad else next(found) for tensor in given)

    differentiable(operator, save=save, backward=backward)


def _apart(tensor: torch.Tensor | None, *, again: bool) -> torch.Tensor | None:
    """A tensor of its own for autograd: gradients are not passed on to what it was made of."""
    if tensor is None or not tensor.requires_grad:
        return tensor
    return tensor.view_as(tensor) if again else tensor.detach().requires_grad_()


def gradients_of(
    definition: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor | None], grad: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of ``definition(*tensors)``, which can be differentiated again; None for those that are not given."""
    given = [
        tensor if tensor is None or tensor.requires_grad else tensor.detach().requires_grad_() for tensor in tensors
    ]
    wanted = [tensor for tensor in given if tensor is not None]
    found = iter(torch.autograd.grad(definition(*given), wanted, grad, create_graph=True))
    return tuple(None if tensor is None else next(found) for tensor in given)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In at least float32, as every fused operator computes."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def wide_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """The type in which a fused operator computes: that to which its operands promote, but at least float32."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
