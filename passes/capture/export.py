"""The one call of ``torch.export``, with what makes it quick and what makes it strict about gradients."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from passes.ir.errors import CaptureError


def export(module: nn.Module, tensors: tuple[torch.Tensor, ...], *, stack_traces: bool = False) -> ExportedProgram:
    """Trace ``module(*tensors)`` to ATen operators, composite ones kept, nothing functionalised.

    Args:
        stack_traces: note on every node the lines it comes from; costs a tenth of the time.

    Raises:
        whatever the model or the tracer raises.
    """
    with warnings.catch_warnings(), _quiet(), _lazy_code(), _no_custom_gradients():
        warnings.simplefilter("ignore")
        with _setting(torch.fx.config, "do_not_emit_stack_traces", not stack_traces):
            return torch.export.export(module, tensors, {}, strict=False)


@contextlib.contextmanager
def _setting(config: Any, name: str, value: Any) -> Iterator[None]:
    """A configuration entry changed inside the block; nothing happens on versions of torch that lack it."""
    if not hasattr(config, name):
        yield
        return
    before = getattr(config, name)
    setattr(config, name, value)
    try:
        yield
    finally:
        setattr(config, name, before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Tracing failures are raised; the graph that the tracer also logs helps nobody."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _lazy_code() -> Iterator[None]:
    """Graph modules compile their Python code when first called: export makes dozens and calls none (a third of its time)."""
    original = GraphModule.recompile

    def recompile(self: GraphModule) -> None:
        def forward(module: GraphModule, *args: Any, **kwargs: Any) -> Any:
            original(module)
            return type(module).forward(module, *args, **kwargs)

        type(self).forward = forward

    GraphModule.recompile = recompile  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        GraphModule.recompile = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _no_custom_gradients() -> Iterator[None]:
    """Refuse ``autograd.Function`` with its own backward: the tracer would keep its forward and lose the backward."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        carries = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in (*args, *kwargs.values()))
        if carries and torch.is_grad_enabled() and not cls.__module__.startswith("torch."):
            raise CaptureError(
                f"{cls.__qualname__} is an autograd.Function with a backward of its own, which tracing would drop: "
                "register it as an operator with torch.library.custom_op and register_autograd"
            )
        return original.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
