"""Triton as the kernels import it; where it is not installed, kernels can be defined but not launched."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

from runtime.torch_compat.compilers import repair_interpreter

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


triton: Any = _Missing()
tl: Any = _Missing()
if has_triton():
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]

    if interprets_triton():
        repair_interpreter()
