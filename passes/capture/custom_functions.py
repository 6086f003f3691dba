"""``torch.autograd.Function`` with a backward of its own: the tracer would keep its forward and lose its backward.

A function that works element by element, with a backward that is linear in the gradient, is traced as
``f(x).detach() + (x - x.detach()) * slope``, where ``slope`` is what its own backward makes of a gradient of ones: the
same value, and exactly its own gradient. Of others, whose backward L is linear in the gradient too, the transpose takes
the place of the slope: ``f(x).detach() + Lᵀ(x - x.detach())``. What is not linear is refused. Functions whose backward
differentiates again are apart (``recomputed_functions``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from passes.capture.flat_call import FlatCall
from passes.capture.function_trials import is_traced, work_if_it_differentiates
from passes.capture.linear_backward import OnlyLinear
from passes.capture.recomputed_functions import RecomputedFunction
from passes.ir.errors import CaptureError
from passes.torch_compat.tracing import Apply, intercepted_functions


def traced_custom_functions(call: FlatCall) -> AbstractContextManager[None]:
    """Inside the block, custom functions are traced with their own gradient, or raise ``CaptureError``."""
    return intercepted_functions(functools.partial(_traced_call, call))


def _traced_call(call: FlatCall, original: Apply, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    carries = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in (*args, *kwargs.values()))
    is_of_torch = cls.__module__.startswith("torch.") and cls is not CheckpointFunction
    if not carries or not torch.is_grad_enabled() or is_of_torch or not is_traced():
        return original(cls, *args, **kwargs)

    def apply(arguments: tuple[Any, ...]) -> Any:
        return original(cls, *arguments)

    work = work_if_it_differentiates(apply, args)
    if work is None:
        return _apply(cls, args)
    needs_gradient = tuple(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)

    def forward(arguments: tuple[Any, ...]) -> Any:
        return _forward(cls, _Context(needs_gradient), arguments)

    call.result.recomputes = True
    names = {id(tensor): name for name, tensor in call.model.named_parameters()}
    return RecomputedFunction(cls, args, apply, forward, names, work).traced()


class _Context:
    """What the function sees as ``ctx``."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_dirty(self, *tensors: Any) -> None:
        raise CaptureError("an autograd.Function that changes its arguments (mark_dirty) cannot be traced: return new "
                           "tensors")  # fmt: skip

    def mark_non_differentiable(self, *tensors: Any) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


class _NotElementwise(Exception):
    """A function may mix elements, or has another number of inputs with a gradient than one."""


class _OnlyElementwise(TorchFunctionMode):
    """Raises if a function is called that may mix elements."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        if name == "setitem" and _fills_mask(*args):
            return args[0].masked_fill_(args[1], args[2])
        result = func(*args, **(kwargs or {}))
        if not _is_elementwise(name) and not (name in _RESHAPING and _keeps_shape(args, result)):
            raise _NotElementwise
        return result


def _apply(cls: Any, args: tuple[Any, ...]) -> Any:
    try:
        return _elementwise(cls, args)
    except _NotElementwise:
        return _transposed(cls, args)


def _elementwise(cls: Any, args: tuple[Any, ...]) -> Any:
    """``f(x).detach() + (x - x.detach()) * slope``."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
    if len(tensors) != 1:
        raise _NotElementwise
    x = tensors[0]
    context = _Context(tuple(arg is x for arg in args))
    with torch.no_grad(), _OnlyElementwise(cls.__qualname__):
        y = _forward(cls, context, args)
        if not isinstance(y, torch.Tensor) or y.shape != x.shape:
            raise _NotElementwise
        ones = torch.ones_like(y)
        with OnlyLinear(ones) as linear:
            slopes = cls.backward(context, ones)
    slope = slopes[context.needs_input_grad.index(True)] if isinstance(slopes, tuple) else slopes
    if slope is None:
        return y.detach()
    if linear.broken_by is not None or slope.shape != x.shape or not linear.follows(slope):
        raise _refusal(cls.__qualname__, f"{linear.broken_by or 'its backward'!r} is not linear in the gradient")
    return y.detach() + (x - x.detach()) * slope.detach()


def _transposed(cls: Any, args: tuple[Any, ...]) -> Any:
    """``f(x).detach() + Lᵀ(x - x.detach())``, where the backward is the linear map L of the gradient.

    The second term is zero, and its own gradient is L. Autograd transposes: Lᵀv is the gradient of ⟨L(g), v⟩ by g.
    """
    name = cls.__qualname__
    needs_gradient = tuple(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    context = _Context(needs_gradient)
    with torch.no_grad():
        results = _forward(cls, context, args)
    outputs = results if isinstance(results, tuple) else (results,)
    if not all(isinstance(output, torch.Tensor) for output in outputs):
        raise _refusal(name, "its forward returns something other than tensors")
    if any(output is arg for output in outputs for arg in args):
        raise _refusal(name, "its forward returns one of its arguments")
    context.saved_tensors = tuple(None if saved is None else saved.detach() for saved in context.saved_tensors)
    gradients = tuple(torch.zeros_like(output).requires_grad_(output.is_floating_point()) for output in outputs)
    with torch.enable_grad(), OnlyLinear(*gradients) as linear:
        slopes = cls.backward(context, *gradients)
    slopes = slopes if isinstance(slopes, tuple) else (slopes,)
    changes: list[torch.Tensor | None] = [None] * len(outputs)
    for arg, slope, is_needed in zip(args, slopes, needs_gradient):
        if not is_needed or slope is None:
            continue
        if linear.broken_by is not None or not linear.follows(slope):
            raise _refusal(name, f"{linear.broken_by or 'its backward'!r} is not linear in the gradient")
        if slope.shape != arg.shape:
            raise _refusal(name, "a gradient of its backward has another shape than the argument")
        if slope.requires_grad:
            changes = _summed(changes, _transpose(slope.to(arg.dtype), gradients, arg - arg.detach()))
    carried = tuple(
        output.detach() if change is None else output.detach() + change for output, change in zip(outputs, changes)
    )
    return carried if isinstance(results, tuple) else carried[0]


def _transpose(
    slope: torch.Tensor, gradients: tuple[torch.Tensor, ...], change: torch.Tensor
) -> list[torch.Tensor | None]:
    """What ``change`` of an input makes of each output, by the transpose of what led from gradients to ``slope``."""
    floating = [gradient for gradient in gradients if gradient.requires_grad]
    transposed = iter(torch.autograd.grad(slope, floating, change, create_graph=True, allow_unused=True))
    return [next(transposed) if gradient.requires_grad else None for gradient in gradients]


def _summed(first: list[torch.Tensor | None], second: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [one if other is None else other if one is None else one + other for one, other in zip(first, second)]


def _forward(cls: Any, context: _Context, args: tuple[Any, ...]) -> Any:
    if cls.setup_context is torch.autograd.Function.setup_context:
        return cls.forward(context, *args)
    outputs = cls.forward(*args)
    cls.setup_context(context, args, outputs)
    return outputs


def _is_elementwise(name: str) -> bool:
    if name in _HARMLESS:
        return True
    for candidate in (name, name.removeprefix("r"), name.removeprefix("i")):
        packet = getattr(torch.ops.aten, candidate, None)
        overloads = packet.overloads() if packet is not None else []
        if any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads):
            return True
    return False


#: Not operators, or operators that give a tensor of the same elements.
_HARMLESS = {"get", "dim", "size", "ones_like", "zeros_like", "clone", "detach", "to", "float", "type", "type_as",
             "float_power", "contiguous", "is_floating_point", "pow", "is_complex", "truediv", "numel"}  # fmt: skip

#: Operators that keep every element where they keep the shape.
_RESHAPING = {"view", "view_as", "reshape", "reshape_as", "expand", "expand_as", "broadcast_to", "alias"}


def _fills_mask(tensor: torch.Tensor, key: Any, value: Any) -> bool:
    """Whether ``tensor[key] = value`` writes one number wherever a mask of the same shape says so."""
    is_mask = isinstance(key, torch.Tensor) and key.dtype == torch.bool and key.shape == tensor.shape
    return is_mask and isinstance(value, (int, float))


def _keeps_shape(args: tuple[Any, ...], result: Any) -> bool:
    return isinstance(result, torch.Tensor) and isinstance(args[0], torch.Tensor) and result.shape == args[0].shape


def _refusal(name: str, reason: str) -> CaptureError:
    return CaptureError(
        f"{name} is an autograd.Function with a backward of its own, which can be traced only if its backward is made "
        f"of operators that are linear in the gradient ({reason}): register it as an operator with "
        "torch.library.custom_op and register_autograd"
    )
