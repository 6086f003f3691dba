"""Who looks at operators as they are called: dispatch and function modes, transforms, the keys of tensors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import overrides
from torch._C import _any_requires_grad as any_requires_grad
from torch._C import _are_functorch_transforms_active as are_transforms_active
from torch._C import _dispatch_keys as dispatch_keys
from torch._C import _get_function_stack_at as function_mode_at  # type: ignore[attr-defined]
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes  # type: ignore[attr-defined]
from torch._C import _len_torch_function_stack as num_function_modes
from torch.autograd import _profiler_enabled as does_profiler_run
from torch.utils import _python_dispatch as dispatch_modes
from torch.utils._device import DeviceContext
from torch.utils._device import _device_constructors as tensor_constructors
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode_temporarily
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

__all__ = [
    "DeviceContext",
    "any_requires_grad",
    "are_operators_observed",
    "are_transforms_active",
    "as_one_operator",
    "dispatch_keys",
    "does_profiler_run",
    "function_mode_at",
    "has_saved_tensor_hooks",
    "in_hidden_device_contexts",
    "native_nll_loss",
    "native_silu",
    "num_dispatch_modes",
    "num_function_modes",
    "outside_device_contexts",
    "plain_key_sets",
    "tensor_constructors",
    "unseen_by_checkpoints",
    "without_dispatch_modes",
    "without_innermost_mode",
]

#: What ``torch.nn.functional`` calls after its questions, which cost as much as the call on a small tensor.
native_silu = torch._C._nn.silu
native_nll_loss = torch._C._nn.nll_loss_nd
_OF_CHECKPOINTS = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


def plain_key_sets(backends: tuple[str, ...]) -> frozenset[int]:
    """The dispatch keys of plain tensors with data, one set for each backend (``"CPU"``, ``"CUDA"``)."""
    key = torch._C.DispatchKey
    kinds = []
    for backend in backends:
        keys = torch._C.DispatchKeySet(key.ADInplaceOrView)
        for name in (backend, f"Autograd{backend}", f"Autocast{backend}"):
            keys = keys | torch._C.DispatchKeySet(getattr(key, name))
        kinds.append(keys.raw_repr())
    return frozenset(kinds)


def has_saved_tensor_hooks() -> bool:
    """Whether somebody is handed what autograd keeps: a checkpoint, which counts the tensors and compares them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def without_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """What runs inside is no part of what the dispatch modes of this thread look at (a counter of collectives)."""
    return _disable_current_modes()


def without_innermost_mode() -> contextlib.AbstractContextManager[Any]:
    """What runs inside is not seen by the innermost dispatch mode of this thread."""
    return _pop_mode_temporarily()


@contextlib.contextmanager
def unseen_by_checkpoints() -> Iterator[None]:
    """Operators that a selective checkpoint around them neither counts nor keeps, so that they may differ again."""
    if not num_dispatch_modes():
        yield
        return
    hidden = []
    while isinstance(dispatch_modes._get_current_dispatch_mode(), _OF_CHECKPOINTS):
        hidden.append(dispatch_modes._pop_mode())
    try:
        yield
    finally:
        for mode in reversed(hidden):
            dispatch_modes._push_mode(mode)


def are_operators_observed() -> bool:
    """Whether a dispatch mode of this thread, other than those of selective checkpoints, is to see every operator."""
    return any(not isinstance(mode, _OF_CHECKPOINTS) for mode in dispatch_modes._get_current_dispatch_mode_stack())


@contextlib.contextmanager
def as_one_operator() -> Iterator[None]:
    """What runs inside is one operator to modes around it: function modes and checkpoints see none of its parts.

    Dynamo of torch 2.13 fails in a function mode that reads attributes, and compiles nothing in a dispatch mode.
    """
    hidden = []
    while num_function_modes():
        hidden.append(overrides._pop_mode())
    try:
        with unseen_by_checkpoints():
            yield
    finally:
        for mode in reversed(hidden):
            overrides._push_mode(mode)


class _HiddenContexts(threading.local):
    """The device contexts that this thread runs compiled functions outside of."""

    def __init__(self) -> None:
        self.contexts: list[DeviceContext] = []


_hidden = _HiddenContexts()


@contextlib.contextmanager
def outside_device_contexts() -> Iterator[None]:
    """Outside the innermost ``with torch.device``, through which dynamo traces no ``Tensor.unflatten``, ``split``, ….

    What makes tensors without saying where belongs into ``in_hidden_device_contexts``.
    """
    before, hidden = _hidden.contexts, list[DeviceContext]()
    while num_function_modes() and type(function_mode_at(num_function_modes() - 1)) is DeviceContext:
        hidden.append(overrides._pop_mode())
    _hidden.contexts = hidden or before
    try:
        yield
    finally:
        _hidden.contexts = before
        for mode in reversed(hidden):
            overrides._push_mode(mode)


@contextlib.contextmanager
def in_hidden_device_contexts() -> Iterator[None]:
    """Tensors are made where they would be without ``outside_device_contexts``."""
    contexts, _hidden.contexts = _hidden.contexts, []
    for mode in reversed(contexts):
        overrides._push_mode(mode)
    try:
        yield
    finally:
        for _ in contexts:
            overrides._pop_mode()
        _hidden.contexts = contexts
