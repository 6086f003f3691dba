"""Triton as the kernels import it; where it is not installed, kernels can be defined but not launched."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

__all__ = ["has_triton", "interprets_triton", "tl", "triton"]


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def interprets_triton() -> bool:
    """Whether kernels run in Triton's interpreter, on any device. Triton reads this when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class _Missing:
    """Stands in for ``triton`` and ``triton.language``: functions are left as they are, names are anything."""

    def jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def __getattr__(self, name: str) -> Any:
        return None


class _Triton:
    """``triton``, whose ``jit`` makes kernels that are launched with little of the host's time, and do not spill.

    See ``runtime.kernels.repeated_launch`` and ``runtime.kernels.spill_free``.
    """

    def jit(self, function: Callable[..., Any]) -> Any:
        if not interprets_triton():
            return RepeatedKernel(function)
        from runtime.torch_compat.triton_interpreter import interpreted_kernel  # here: needs NumPy

        return interpreted_kernel(function)

    def __getattr__(self, name: str) -> Any:
        return getattr(triton_package, name)


triton: Any = _Missing()
tl: Any = _Missing()
if has_triton():
    import triton as triton_package
    import triton.language as tl  # type: ignore[no-redef]

    from runtime.kernels.repeated_launch import RepeatedKernel

    triton = _Triton()
