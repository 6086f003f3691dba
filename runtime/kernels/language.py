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


def _repair_interpreter() -> None:
    """Let loops run to a bound given at launch: NumPy 2.4 no longer makes an int of the array of one that holds it."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def repaired(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

    interpreter._patch_lang_tensor = repaired


triton: Any = _Missing()
tl: Any = _Missing()
if has_triton():
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]

    if interprets_triton():
        _repair_interpreter()
