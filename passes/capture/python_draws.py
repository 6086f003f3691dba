"""Random numbers that a model's forward draws outside of torch: a program would repeat the one that was traced.

Of Python's random numbers from [0, 1) those may be drawn that are only compared, with a bound that decides it for all
of them: ``random.uniform(0, 1) < layerdrop`` where that is zero (``drawn_numbers``).
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

from passes.capture.drawn_numbers import DrawnNumber
from passes.ir.errors import CaptureError


@contextlib.contextmanager
def no_python_draws() -> Iterator[None]:
    """Raise CaptureError, at the latest at the end of the block, if something depends on what it drew."""
    before = _generators()
    functions, thread = (random.random, random.uniform), threading.get_ident()

    def number() -> Any:
        return DrawnNumber(_error("Python's random")) if threading.get_ident() == thread else functions[0]()

    def uniform(a: float, b: float) -> Any:
        return number() if (a, b) == (0, 1) else functions[1](a, b)

    random.random, random.uniform = number, uniform
    try:
        yield
    finally:
        random.random, random.uniform = functions
    for name, state in _generators().items():
        if name in before and before[name] != state:
            raise _error(name)


def _error(name: str) -> CaptureError:
    return CaptureError(
        f"forward draws from {name}, which would be drawn once, while tracing, and never again: draw with torch "
        "(torch.rand), or draw outside and pass the number as an argument"
    )


def _generators() -> dict[str, Any]:
    states: dict[str, Any] = {"Python's random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = (name, keys.tobytes(), *rest)
    return states
