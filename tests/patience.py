"""What tests say about time: how long a process may hang, and how much work a function does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

#: Seconds after which a process is taken to hang: many times what any test takes, so slow machines pass.
PATIENCE = 1200.0


def calls_made(function: Callable[[], Any], *, give_up_after: int = 100_000_000) -> int:
    """Calls of Python and C functions that ``function`` makes: work that is the same on every machine.

    Raises:
        AssertionError: after ``give_up_after`` calls, so that a test of what must be quick does not take for ever.
    """
    count = 0

    def counted(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")
        if count > give_up_after:
            sys.setprofile(None)
            raise AssertionError(f"more than {give_up_after} calls: {frame.f_code.co_qualname}")

    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
