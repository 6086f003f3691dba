"""Dynamo's limit of recompilations."""

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
