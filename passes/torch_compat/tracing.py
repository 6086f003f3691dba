"""Faults of ``torch.export`` and its surroundings, mended for the time of one call of it on one thread.

Every context here replaces something of torch for the whole process, so only one capture at a time may enter them
(``passes.capture`` holds a lock); other threads find what they call unchanged in effect.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._decomp import decompositions
from torch.autograd.function import _SingleLevelFunction
from torch.distributions import Distribution
from torch.export import _trace
from torch.fx import GraphModule
from torch.fx.experimental import proxy_tensor
from torch.nn.modules.batchnorm import _BatchNorm

#: ``Function.apply``: class, then the arguments.
Apply = Callable[..., Any]


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """Tracing failures are raised; the graph that the tracer also logs and prints helps nobody."""
    loggers = [
        logging.getLogger(f"torch.{name}") for name in ("fx.experimental.symbolic_shapes", "_subclasses.fake_tensor")
    ]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    vars(_trace)["print"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for logger, was_disabled in zip(loggers, before):
            logger.disabled = was_disabled
        del vars(_trace)["print"]


@contextlib.contextmanager
def lazy_code() -> Iterator[None]:
    """Graph modules compile their code when first called: export makes dozens and calls none (a third of its time)."""
    original = GraphModule.recompile
    tracing = threading.get_ident()

    def recompile(self: GraphModule) -> Any:
        if threading.get_ident() != tracing:
            return original(self)

        def forward(module: GraphModule, *args: Any, **kwargs: Any) -> Any:
            original(module)
            return type(module).forward(module, *args, **kwargs)

        type(self).forward = forward

    GraphModule.recompile = recompile  # type: ignore[method-assign]
    try:
        yield
    finally:
        GraphModule.recompile = original  # type: ignore[method-assign]


@contextlib.contextmanager
def float32_precisions_kept() -> Iterator[None]:
    """Export switches libraries off and on without a word about their precision of float32.

    torch's own way writes ``allow_tf32`` of cuDNN, too: it raises where ``fp32_precision`` was set, and elsewhere
    leaves convolutions that do not follow ``torch.backends.fp32_precision`` any more.
    """
    original = _trace._ignore_backend_decomps
    _trace._ignore_backend_decomps = _libraries_off
    try:
        yield
    finally:
        _trace._ignore_backend_decomps = original


@contextlib.contextmanager
def _libraries_off() -> Iterator[None]:
    cudnn, mkldnn = bool(torch.backends.cudnn.enabled), bool(torch.backends.mkldnn.enabled)
    nnpack = torch.backends.nnpack.set_flags(False)
    torch._C._set_cudnn_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_enabled(cudnn)
        torch._C._set_mkldnn_enabled(mkldnn)
        torch.backends.nnpack.set_flags(*nnpack)


@contextlib.contextmanager
def unknown_sizes_sought_if_any() -> Iterator[None]:
    """Export seeks sizes that values decide in every tensor of the graph, also where there is none."""
    original = _trace._replace_unbacked_bindings

    def replace(gm: GraphModule) -> None:
        values = (node.meta.get("val") for node in gm.graph.nodes)
        modes = {id(mode): mode for value in values if (mode := getattr(value, "fake_mode", None)) is not None}
        shapes = [mode.shape_env for mode in modes.values()]
        if not shapes or any(shape_env is None or shape_env.var_to_range for shape_env in shapes):
            original(gm)
            return
        for node in gm.graph.nodes:
            node.meta.pop("unbacked_bindings", None)

    _trace._replace_unbacked_bindings = replace
    try:
        yield
    finally:
        _trace._replace_unbacked_bindings = original


@contextlib.contextmanager
def shapes_noted_once() -> Iterator[None]:
    """Nodes carry the fake tensor that they give, and not, for older readers, its shape and strides beside it."""
    original = proxy_tensor._extract_tensor_metadata
    proxy_tensor._extract_tensor_metadata = lambda *_, **__: None  # type: ignore[assignment]
    try:
        yield
    finally:
        proxy_tensor._extract_tensor_metadata = original


@contextlib.contextmanager
def stack_traces_noted(notes: bool) -> Iterator[None]:
    """Whether nodes carry the lines of code that they come from; torch 2.11 notes them whatever is asked."""
    config: Any = getattr(torch.fx, "config", None)
    if not hasattr(config, "do_not_emit_stack_traces"):
        yield
        return
    before, config.do_not_emit_stack_traces = config.do_not_emit_stack_traces, not notes
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


@contextlib.contextmanager
def intercepted_functions(intercept: Callable[[Apply, Any, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """On this thread, a call of an ``autograd.Function`` is ``intercept(original, class, args, kwargs)``.

    ``Function.apply`` itself stays: models keep it under names of their own (``swish = Swish.apply``), from before the
    block. What it calls is replaced.
    """
    original = torch._C._FunctionBase.__dict__["apply"]
    tracing = threading.get_ident()

    def call_original(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return original.__get__(None, cls)(*args, **kwargs)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != tracing:
            return call_original(cls, *args, **kwargs)
        return intercept(call_original, cls, args, kwargs)

    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]


@contextlib.contextmanager
def idle_conversions() -> Iterator[None]:
    """On this thread, ``module.to(...)`` that changes no tensor leaves them alone: export's own cannot be swapped.

    One that changes any raises RuntimeError, which says what to do.
    """
    original = nn.Module._apply
    tracing = threading.get_ident()

    def apply(self: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == tracing:
            tensors = (*self.parameters(), *self.buffers())
            if all(function(tensor) is tensor for tensor in tensors):
                return self
            raise RuntimeError(
                f"forward converts the weights of {type(self).__name__} for good (module.to), so that the first call "
                "would train other parameters than it was given: convert them before (call forward once, or "
                "module.to(…) there)"
            )
        return original(self, function, *args, **kwargs)

    nn.Module._apply = apply  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


class CompilingFlags:
    """``torch.compiler.is_compiling`` and ``is_exporting`` as code outside of torch sees them on this thread.

    Args:
        seen: False: they say that nothing is compiled, as in eager; True: as torch sets them.

    Attributes:
        asked: whether such code has asked.
    """

    _NAMES = ("is_compiling", "is_exporting")
    _TORCH = str(Path(torch.__file__).parent)

    def __init__(self, *, seen: bool) -> None:
        self.asked = False
        self._seen = seen

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """A context in which they are."""
        originals = {name: getattr(torch.compiler, name) for name in self._NAMES}
        tracing = threading.get_ident()

        def answered_by(original: Callable[[], bool]) -> Callable[[], bool]:
            def flag() -> bool:
                asks = sys._getframe(1).f_code.co_filename
                if threading.get_ident() != tracing or asks.startswith(self._TORCH):
                    return original()
                self.asked = True
                return self._seen and original()

            return flag

        for name, original in originals.items():
            setattr(torch.compiler, name, answered_by(original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(torch.compiler, name, original)


@contextlib.contextmanager
def states_of_lstm_layers() -> Iterator[None]:
    """An LSTM's last states have the shapes of its first ones; torch 2.11 traces them with a dim of 1 too many."""
    original = decompositions.one_layer_lstm

    def layer(inputs: Any, states: Any, *args: Any, **kwargs: Any) -> Any:
        outputs, last = original(inputs, states, *args, **kwargs)
        return outputs, tuple(one.reshape(first.shape) for one, first in zip(last, states, strict=True))

    decompositions.one_layer_lstm = layer  # type: ignore[assignment]
    try:
        yield
    finally:
        decompositions.one_layer_lstm = original


@contextlib.contextmanager
def batch_norms_without_momentum(call: Callable[[Any, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Batch norms that train with ``momentum=None`` are ``call``'s: they read the number of batches they have seen."""
    original = _BatchNorm.forward
    tracing = threading.get_ident()

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        averages = self.training and self.momentum is None and self.num_batches_tracked is not None
        if threading.get_ident() != tracing or not averages:
            return original(self, input)
        self._check_input_dim(input)
        return call(self, input)

    _BatchNorm.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        _BatchNorm.forward = original  # type: ignore[method-assign]


@contextlib.contextmanager
def recurrent_inputs_of_any_dtype() -> Iterator[None]:
    """On this thread, recurrent layers take inputs of another dtype than their weights, as they do under autocast."""
    original = nn.RNNBase.check_input
    tracing = threading.get_ident()

    def check_input(self: Any, input: torch.Tensor, batch_sizes: torch.Tensor | None) -> None:
        if threading.get_ident() == tracing:
            input = input.to(self.weight_ih_l0.dtype)
        original(self, input, batch_sizes)

    nn.RNNBase.check_input = check_input  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.RNNBase.check_input = original  # type: ignore[method-assign]


@contextlib.contextmanager
def unvalidated_distributions() -> Iterator[None]:
    """``torch.distributions`` made in here do not look at the values of their parameters, which tracing has not."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
