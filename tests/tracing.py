"""Models traced once for all the plans that a test tries them under, and for all ranks and tests of a run.

Tracing a small model takes longer than planning, emitting and running it, and every plan has the same graph
(``tests/test_capture*.py`` see to what the graph is).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import torch
from torch import nn

import passes.capture  # noqa: F401
import runtime.execution.program_builder as builder
from passes.capture.nested_values import flatten
from runtime.calls.content_keys import state_key, structure_key
from tests.open_trace import OpenTrace


@contextlib.contextmanager
def traced_once() -> Iterator[None]:
    """Inside the block, what a model is traced to is kept for all models of its classes, sizes and attributes.

    A plan's search traces the model with its weights, compile traces it without them: that is one graph.

    Instances whose ``forward`` is replaced are told from each other by nothing: do not trace them here.
    """
    module = sys.modules["passes.capture.capture"]  # the package has a function of that name
    in_full, shortened = vars(module)["_capture_whole"], vars(module)["_capture_shortened"]
    trace_shapes = builder.trace_shapes
    graphs: dict[object, Any] = {}

    def graph_of(model: nn.Module, key: tuple[object, ...], trace: Callable[[], Any]) -> Any:
        if _must_be_called(model):
            return trace()
        if key not in graphs:
            graph = _traced_by_one_process(repr(key), trace)
            if graph is not None and graph.guards:  # it is for calls with the same values alone
                return graph
            graphs[key] = graph
        return graphs[key]

    def traced_shortened(model: nn.Module, options: dict[str, Any]) -> Any:
        return graph_of(model, ("shortened", *_key(model, **options)), lambda: shortened(model, options))

    def traced_in_full(model: nn.Module, **options: Any) -> Any:
        return graph_of(model, ("in full", *_key(model, **options)), lambda: in_full(model, **options))

    def traced_for_shapes(model: nn.Module, open_dims: Any, **options: Any) -> Any:
        dims = sorted((path, sorted(dims)) for path, dims in open_dims.items())
        key = ("open", dims, *_key(model, training=None, **options))
        file = None if _must_be_called(model) else _file_of(repr(key))

        def trace() -> Any:
            return trace_shapes(model, open_dims, **options)

        return trace() if file is None else OpenTrace(file, trace)

    with (
        mock.patch.object(builder, "trace_shapes", traced_for_shapes),
        mock.patch.object(module, "_capture_shortened", traced_shortened),
        mock.patch.object(module, "_capture_whole", traced_in_full),
    ):
        yield


def _traced_by_one_process(key: str, trace: Callable[[], Any]) -> Any:
    """What the first process of this run of the tests traces, which the others read."""
    file = _file_of(key)
    if file is None:
        return trace()
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if file.exists():
            return pickle.loads(file.read_bytes())
        traced = trace()
        if traced is not None and traced.guards:
            return traced
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):  # of a class that has no name
            file.write_bytes(pickle.dumps(traced))
        return traced


def _file_of(key: str) -> Path | None:
    """Where this run of the tests keeps what ``key`` names; None if objects in it are not told apart by a text."""
    run = os.environ.get("MESHWRIGHT_TEST_RUN")
    if run is None or " at 0x" in key or "<locals>" in key:
        return None
    own = sys.argv[0] if "__main__" in key else ""
    return Path(run) / f"{hashlib.sha256((own + key).encode()).hexdigest()}.graph"


def _must_be_called(model: nn.Module) -> bool:
    """Whether modules have lambdas or local functions, which have no name of their own; or hooks, which may do more.

    What a generation caches is noted by hooks while the model is called.
    """
    has_hooks = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return has_hooks or any("<" in name for *_, name in _functions(model))


def _key(
    model: nn.Module,
    *,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    loss_fn: Any,
    training: bool | None,
    gradients: bool = False,
    **values: Any,  # only graphs that read none are kept
) -> tuple[Any, ...]:
    structure, tensors = flatten((args, dict(kwargs or {})))
    shapes = tuple((path, tuple(t.shape), t.dtype, t.requires_grad) for path, t in tensors.items())
    modules = tuple((name, type(module), module.training) for name, module in model.named_modules())
    modes = tuple(map(type, torch.overrides._get_current_function_mode_stack()))
    code = getattr(loss_fn, "__code__", None)
    function = type(loss_fn) if code is None else _code_key(code)
    return (
        *(modules, _functions(model), _states(model), _plain_attributes(model), repr(getattr(model, "config", None))),
        *(shapes, structure_key(structure, ""), function, state_key(loss_fn), training, gradients, modes),
    )


def _code_key(code: CodeType) -> tuple[object, ...]:
    """A function by its code; functions inside of it by theirs, whose texts would say where they lie in memory."""
    constants = tuple(_code_key(one) if isinstance(one, CodeType) else one for one in code.co_consts)
    return (code.co_filename, code.co_firstlineno, code.co_code, constants)


_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def _plain_attributes(model: nn.Module) -> str:
    """The numbers, texts and flags of the modules, and those in their containers; other entries by their class."""
    usual = vars(nn.Module()).keys()
    return repr(
        {
            (path, name): _entries(value)
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if name not in usual and isinstance(value, (*_PLAIN, list, dict, set))
        }
    )


def _entries(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: entry if isinstance(entry, _PLAIN) else type(entry) for key, entry in value.items()}
    if isinstance(value, (list, set)):
        return [entry if isinstance(entry, _PLAIN) else type(entry) for entry in value]
    return value


def _functions(model: nn.Module) -> tuple[tuple[str, str, str], ...]:
    """Functions that modules have as attributes: path, attribute and name."""
    return tuple(
        (path, attribute, value.__qualname__)
        for path, module in model.named_modules()
        for attribute, value in vars(module).items()
        if hasattr(value, "__qualname__")
    )


def _states(model: nn.Module) -> tuple[Any, ...]:
    """Names, shapes and dtypes of parameters and buffers, and which of them are one."""
    numbers: dict[int, int] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return tuple(
        (name, tuple(t.shape), t.dtype, t.requires_grad, numbers.setdefault(id(t), len(numbers))) for name, t in named
    )
