"""Random numbers that a model's forward draws outside of torch: a program would repeat the one that was traced."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

from passes.ir.errors import CaptureError


@contextlib.contextmanager
def no_python_draws() -> Iterator[None]:
    """Raise CaptureError at the end of the block if it drew from Python's or numpy's random numbers."""
    before = _generators()
    yield
    for name, state in _generators().items():
        if name in before and before[name] != state:
            raise CaptureError(
                f"forward draws from {name}, which would be drawn once, while tracing, and never again: draw with "
                "torch (torch.rand), or draw outside and pass the number as an argument"
            )


def _generators() -> dict[str, Any]:
    states: dict[str, Any] = {"Python's random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = (name, keys.tobytes(), *rest)
    return states
