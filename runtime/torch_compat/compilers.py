"""Dynamo's limit of recompilations, and Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class TooManyKinds(Exception):
    """Dynamo has compiled a function as many times as it may."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


def call_within_limit(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call what ``torch.compile`` gave.

    Raises:
        TooManyKinds: where Dynamo would run ``function`` operator by operator from now on.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit  # here: importing the compiler takes a second

    try:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            return function(*arguments)
    except FailOnRecompileLimitHit:
        raise TooManyKinds(torch._dynamo.config.recompile_limit) from None


def repair_interpreter() -> None:
    """Let loops run to a bound given at launch: NumPy 2.4 no longer makes an int of the array of one that holds it.

    For the whole process and for good, where ``TRITON_INTERPRET=1`` asks for the interpreter (triton 3.6 with NumPy
    2.4): a kernel is interpreted on whatever thread launches it.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def repaired(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

    interpreter._patch_lang_tensor = repaired
