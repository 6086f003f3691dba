"""The one call of ``torch.export``, with what makes it quick and what makes it strict about gradients."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram, _trace
from torch.fx import GraphModule

from passes.capture.custom_functions import traced_custom_functions


def export(module: nn.Module, tensors: tuple[torch.Tensor, ...], *, stack_traces: bool = False) -> ExportedProgram:
    """Trace ``module(*tensors)`` to ATen operators, composite ones kept, nothing functionalised.

    Args:
        stack_traces: note on every node the lines it comes from; costs a tenth of the time.

    Raises:
        whatever the model or the tracer raises.
    """
    with warnings.catch_warnings(), _quiet(), _lazy_code(), traced_custom_functions():
        warnings.simplefilter("ignore")
        with _setting(getattr(torch.fx, "config", None), "do_not_emit_stack_traces", not stack_traces):
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
    """Tracing failures are raised; the graph that the tracer also logs and prints helps nobody."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    before, logger.disabled = logger.disabled, True
    vars(_trace)["print"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        logger.disabled = before
        del vars(_trace)["print"]


@contextlib.contextmanager
def _lazy_code() -> Iterator[None]:
    """Graph modules compile their code when first called: export makes dozens and calls none (a third of its time)."""
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
