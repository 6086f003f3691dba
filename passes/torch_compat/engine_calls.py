"""Calls of the autograd engine from Python."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import autograd


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def engine_calls_in(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """On this thread, every ``backward`` and ``torch.autograd.grad`` runs inside of ``context()``.

    torch takes off the modes of functions for the time of such a call, those that a custom backward needs among them.
    """
    original = autograd._engine_run_backward
    calling = threading.get_ident()

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with context() if threading.get_ident() == calling else contextlib.nullcontext():
            return original(*args, **kwargs)

    autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]
    try:
        yield
    finally:
        autograd._engine_run_backward = original  # type: ignore[attr-defined]
