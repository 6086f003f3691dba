"""Triton's interpreter (triton 3.6), with a fault that NumPy 2.4 brings out; imported where kernels are interpreted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import triton
from triton.runtime import interpreter

_patch_tensors = interpreter._patch_lang_tensor
_lock = threading.Lock()
_num_launches = 0


def interpreted_kernel(function: Callable[..., Any]) -> Any:
    """``triton.jit`` where ``TRITON_INTERPRET=1``; loops may run to a bound given at launch."""
    kernel: Any = triton.jit(function)
    interpret = kernel.run

    def run(*arguments: Any, **options: Any) -> Any:
        with _loops_to_bounds():
            return interpret(*arguments, **options)

    kernel.run = run
    return kernel


@contextlib.contextmanager
def _loops_to_bounds() -> Iterator[None]:
    """NumPy 2.4 no longer makes an int of the array of one in which the interpreter holds a number: the hook that
    prepares its tensors does, while a launch of ours runs on any thread."""
    global _num_launches
    with _lock:
        _num_launches += 1
        interpreter._patch_lang_tensor = _prepare_tensors
    try:
        yield
    finally:
        with _lock:
            _num_launches -= 1
            if not _num_launches:
                interpreter._patch_lang_tensor = _patch_tensors


def _prepare_tensors(tensor: Any, scope: Any) -> None:
    _patch_tensors(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))
