"""``torch.vmap`` while a model is traced: who calls it, and which operators it calls on the whole batch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._functorch import apis
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from passes.torch_compat.tensor_fields import is_inside_transform

#: Answers a call of what ``torch.vmap`` made: ``intercept(original, args, kwargs)``.
Intercept = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextlib.contextmanager
def intercepted_vmap(intercept: Intercept) -> Iterator[None]:
    """On this thread, calls of what ``torch.vmap`` made are ``intercept``'s, but for those inside of a transform."""
    original: Callable[..., Any] = apis.vmap_impl
    tracing = threading.get_ident()

    def vmap_impl(
        function: Any, in_dims: Any, out_dims: Any, randomness: Any, chunk_size: Any, *args: Any, **kwargs: Any
    ) -> Any:
        call = partial(original, function, in_dims, out_dims, randomness, chunk_size)
        if threading.get_ident() != tracing or is_inside_transform():
            return call(*args, **kwargs)
        return intercept(call, args, kwargs)

    apis.vmap_impl = vmap_impl  # type: ignore[assignment]
    try:
        yield
    finally:
        apis.vmap_impl = original  # type: ignore[assignment]


def operators_of(
    function: Callable[..., Any], tensors: Sequence[torch.Tensor], *, watched_by: type[TorchFunctionMode]
) -> fx.GraphModule:
    """The operators that ``function`` calls on tensors without data, apart from the trace that is under way.

    Tensors that it takes from elsewhere are constants of the graph.

    Args:
        watched_by: the mode of that trace; modes that were entered after it stay.
    """
    fake = detect_fake_mode(list(tensors))
    with apart_from_trace(watched_by), torch.no_grad(), fake or contextlib.nullcontext():
        module: fx.GraphModule = make_fx(function)(*tensors)
    return module


@contextlib.contextmanager
def apart_from_trace(watched_by: type[TorchFunctionMode]) -> Iterator[None]:
    """In the block nothing is traced; modes that were entered after ``watched_by``, that trace's own, stay."""
    with _modes_after(watched_by), _disable_current_modes():
        yield


@contextlib.contextmanager
def _modes_after(kind: type[TorchFunctionMode]) -> Iterator[None]:
    """Of the modes that functions of torch are called in, only those that were entered after the last of ``kind``."""
    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]
    place = next((place for place, mode in enumerate(modes) if isinstance(mode, kind)), len(modes))
    for mode in modes[:place][::-1]:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes[:place]:
            _pop_mode()
        for mode in modes[::-1]:
            _push_mode(mode)
