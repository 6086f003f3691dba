"""``torch.autograd.Function`` with a backward of its own: the tracer would keep its forward and lose its backward.

A function that works element by element is traced as ``f(x).detach() + (x - x.detach()) * slope``, where ``slope`` is
what its own backward makes of a gradient of ones: the same value, and exactly its own gradient. Others are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from passes.ir.errors import CaptureError


@contextlib.contextmanager
def traced_custom_functions() -> Iterator[None]:
    """Inside the block, custom functions are traced with their own gradient, or raise ``CaptureError``."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        carries = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in (*args, *kwargs.values()))
        if not carries or not torch.is_grad_enabled() or cls.__module__.startswith("torch."):
            return original.__get__(None, cls)(*args, **kwargs)
        return _apply(cls, args)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


class _Context:
    """What the function sees as ``ctx``."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


class _OnlyElementwise(TorchFunctionMode):
    """Raises if a function is called that may mix elements."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        if not _is_elementwise(name):
            raise _refusal(self.name, f"{name!r} may mix elements")
        return func(*args, **(kwargs or {}))


def _apply(cls: Any, args: tuple[Any, ...]) -> Any:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
    if len(tensors) != 1:
        raise _refusal(cls.__qualname__, f"{len(tensors)} of its inputs carry a gradient, one is expected")
    x = tensors[0]
    context = _Context(tuple(arg is x for arg in args))
    with torch.no_grad(), _OnlyElementwise(cls.__qualname__):
        if cls.setup_context is torch.autograd.Function.setup_context:
            y = cls.forward(context, *args)
        else:
            y = cls.forward(*args)
            cls.setup_context(context, args, y)
        if not isinstance(y, torch.Tensor) or y.shape != x.shape:
            raise _refusal(cls.__qualname__, "its output has another shape than its input")
        slopes = cls.backward(context, torch.ones_like(y))
    slope = slopes[context.needs_input_grad.index(True)] if isinstance(slopes, tuple) else slopes
    return y.detach() + (x - x.detach()) * slope.detach()


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


def _refusal(name: str, reason: str) -> CaptureError:
    return CaptureError(
        f"{name} is an autograd.Function with a backward of its own, which can be traced only if it works element by "
        f"element ({reason}): register it as an operator with torch.library.custom_op and register_autograd"
    )
