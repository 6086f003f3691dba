"""How long a call takes: on a processor by the clock, on a GPU by its own events."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

import torch

#: Rounds of which the one in the middle counts, and seconds that a round takes at least, by many calls if need be:
#: longer than a process runs in one go that has a share of a processor, or what is short would have all of it.
ROUNDS, ROUND_SECONDS = 5, 2e-2
#: More bytes than the caches of a device hold, and copies of a call's tensors at most to come to as many.
COLD_BYTES, MOST_COPIES = 64 * 2**20, 64
#: Calls that follow each other in a chain; chains at least, and seconds that they take at least together.
CHAIN, CHAINS, CHAINS_SECONDS = 8, 2, 0.6
#: The compute: so many products of matrices of that side, some milliseconds, as a layer's share of a step takes.
NUM_PRODUCTS, PRODUCT_SIDE = 4, 448

Call = Callable[[], Any]


def seconds_of(call: Call, device: torch.device, *, agree: Callable[[float], float]) -> float:
    """Seconds of one call: the median of rounds of calls one after the other.

    Args:
        agree: makes of each rank's seconds one number: ranks that call collectives make the same number of calls.
    """
    call()
    seconds = agree(_round(call, 1, device))
    calls = max(1, min(10_000, int(ROUND_SECONDS / max(seconds, 1e-9))))
    return median(_round(call, calls, device) for _ in range(ROUNDS)) / calls


def seconds_to_enqueue(call: Call, device: torch.device, *, agree: Callable[[float], float], operators: int) -> float:
    """Seconds of the host for each of the ``operators`` that a call launches: the median of rounds.

    Nothing is waited for between its first and its last operator: of a device that runs apart from the host the clock
    shows what the host does alone, as long as the device's queue takes them all and none waits for memory.
    """
    call()
    rounds = []
    for _ in range(ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        rounds.append(time.perf_counter() - start)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return agree(median(rounds)) / operators


def cold(make: Callable[[], Call], num_bytes: float) -> Call:
    """A call that reads and writes other memory each time, so that no more of it lies in the caches than in a step.

    A step keeps what operators give until its backward pass: results stay as many calls long as there are tensors to
    take turns with, or the next call would write into the caches, which is up to three times as fast.

    Args:
        make: makes a call with tensors of its own.
        num_bytes: of them and of its result.
    """
    copies = max(1, min(MOST_COPIES, math.ceil(COLD_BYTES / max(num_bytes, 1.0))))
    turns = itertools.cycle([make() for _ in range(copies)])
    results: deque[Any] = deque(maxlen=copies)
    return lambda: results.append(next(turns)())


def seconds_behind_compute(collective: Call, device: torch.device, *, agree: Callable[[float], float]) -> float:
    """Seconds by which a collective makes products take longer, in the mean.

    Ranks of a program come to a collective from computing, one later than another (the longer they have computed, the
    more), and where the host's processors carry the bytes they have been busy until then: collectives one after the
    other are quicker than that, and their median hides the calls that wait for a processor. Products and collectives
    follow each other in chains, as layers of a program do: behind products without a collective ranks would come later
    still. Of chains the slowest rank's seconds count, with the collective and without. On a GPU, which carries bytes
    itself, collectives are timed one after the other.
    """
    if device.type == "cuda":
        return seconds_of(collective, device, agree=agree)
    left, right = (torch.rand(PRODUCT_SIDE, PRODUCT_SIDE) for _ in range(2))

    def compute() -> None:
        for _ in range(NUM_PRODUCTS):
            torch.mm(left, right)

    def both() -> None:
        compute()
        collective()

    both()
    once = agree(_round(both, 1, device))
    alone: list[float] = []
    together: list[float] = []
    for _ in range(_chains(once)):
        for call, seconds in ((compute, alone), (both, together)):
            agree(0.0)
            seconds.append(agree(_round(call, CHAIN, device)) / CHAIN)
    return max(fmean(together) - fmean(alone), min(together) - min(alone), 1e-7)


def seconds_one_way(there_and_back: Call, device: torch.device, *, agree: Callable[[float], float]) -> float:
    """Seconds of a message between processors, in the mean, of calls that send one and await one.

    A stage of a pipeline waits for the one before it, not both for each other: what one comes late, messages do not.
    """
    there_and_back()
    once = agree(_round(there_and_back, 1, device))
    seconds = []
    for _ in range(_chains(once)):
        agree(0.0)
        seconds.append(agree(_round(there_and_back, CHAIN, device)) / CHAIN)
    return fmean(seconds) / 2


def _chains(seconds: float) -> int:
    """How many chains of calls of so many seconds are timed."""
    return max(CHAINS, min(10 * CHAINS, math.ceil(CHAINS_SECONDS / (CHAIN * max(seconds, 1e-9)))))


def _round(call: Call, calls: int, device: torch.device) -> float:
    if device.type == "cuda":
        return _gpu_round(call, calls)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


def _gpu_round(call: Call, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
