"""How long a call takes: on a processor by the clock, on a GPU by its own events."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

#: Rounds of which the one in the middle counts, and seconds that a round takes at least, by many calls if need be.
ROUNDS, ROUND_SECONDS = 5, 2e-3


def seconds_of(call: Callable[[], Any], device: torch.device, *, agree: Callable[[float], float]) -> float:
    """Seconds of one call: the median of rounds of calls one after the other.

    Args:
        agree: makes of each rank's seconds one number: ranks that call collectives make the same number of calls.
    """
    call()
    seconds = agree(_round(call, 1, device))
    calls = max(1, min(10_000, int(ROUND_SECONDS / max(seconds, 1e-9))))
    return median(_round(call, calls, device) for _ in range(ROUNDS)) / calls


def _round(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    if device.type == "cuda":
        return _gpu_round(call, calls)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


def _gpu_round(call: Callable[[], Any], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
