"""Times, peak memory and errors of calls, on a GPU by its own events, elsewhere by the clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

FEWEST, MOST = 3, 50
#: More calls before the first that counts, of calls that are quick.
WARM_UP = 2
#: Seconds that the runs of one measurement should take.
BUDGET = 0.2
#: So many times the L2 cache is written between runs.
FLUSH = 4
#: At most so long before a run, in seconds.
LONGEST_FLUSH = 0.02
#: Of a GPU that does not say how large its cache is.
CACHE_BYTES = 64 * 2**20
MOST_COPIED = 4 * 2**30


@dataclass(frozen=True)
class Timing:
    """Seconds of a call: median, and quartiles."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Timing:
        low, median, high = statistics.quantiles(seconds, n=4)
        return Timing(median, low, high)


class Clock:
    """Measures calls on one device.

    On a GPU the L2 cache is written over before each run, so that nothing is read from it, and a run pays for as much
    that others left unwritten as it leaves itself. It is written for longer than the host takes to launch the run:
    launches are then queued when the run's first event passes, and only the device's time counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or CACHE_BYTES
            self._cover = torch.empty(FLUSH * cache, dtype=torch.int8, device=device)
            self._flush_seconds = self._events(self._cover.zero_)[0]

    def time(self, call: Callable[[Any], Any], prepare: Callable[[], Any] = lambda: None) -> Timing:
        """Seconds of ``call(prepare())``; what ``prepare`` does is not timed, and done before each run."""
        launched, whole = self._tried(call, prepare)
        for _ in range(WARM_UP):
            if whole < BUDGET / MOST:
                launched, whole = self._tried(call, prepare)
        runs = max(FEWEST, min(MOST, int(BUDGET / max(whole, 1e-6))))
        if not self.on_gpu:
            return Timing.of([self._clocked(call, prepare) for _ in range(runs)])
        flushes = max(1, math.ceil(min(1.5 * launched, LONGEST_FLUSH) / self._flush_seconds))
        events = [self._queued(call, prepare, flushes) for _ in range(runs)]
        self.synchronize()
        return Timing.of([start.elapsed_time(end) / 1e3 for start, end in events])

    def peak_bytes(self, call: Callable[[], Any]) -> int | None:
        """Most memory that the call holds above what was held before; None where torch does not count it."""
        if not self.on_gpu:
            return None
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    def copy_bandwidth(self) -> float:
        """Bytes per second, read and written, of copying a large tensor: the limit of what memory allows."""
        size = 2**22
        if self.on_gpu:
            free, _ = torch.cuda.mem_get_info(self.device)
            size = min(MOST_COPIED, free // 8)
        source = torch.ones(size, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        seconds = self.time(lambda _: target.copy_(source)).median
        return 2 * size / seconds

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give back what is cached, after an error or a large case."""
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _tried(self, call: Callable[[Any], Any], prepare: Callable[[], Any]) -> tuple[float, float]:
        """Seconds of the host until one run was launched, and until it was done."""
        operands = prepare()
        self.synchronize()
        start = time.perf_counter()
        call(operands)
        launched = time.perf_counter() - start
        self.synchronize()
        return launched, time.perf_counter() - start

    def _events(self, call: Callable[[], Any]) -> list[float]:
        """Seconds of some runs without anything between them, shortest first."""
        pairs = []
        for _ in range(FEWEST):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        self.synchronize()
        return sorted(start.elapsed_time(end) / 1e3 for start, end in pairs)

    def _queued(self, call: Callable[[Any], Any], prepare: Callable[[], Any], flushes: int) -> tuple[Any, Any]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        operands = prepare()
        for _ in range(flushes):
            self._cover.zero_()
        start.record()
        call(operands)
        end.record()
        return start, end

    @staticmethod
    def _clocked(call: Callable[[Any], Any], prepare: Callable[[], Any]) -> float:
        operands = prepare()
        start = time.perf_counter()
        call(operands)
        return time.perf_counter() - start


def largest_error(results: Sequence[torch.Tensor], truths: Sequence[torch.Tensor]) -> float:
    """Largest difference from the truth over the truth's largest entry, of the worst of several tensors.

    NaN if anything is.
    """
    worst = 0.0
    for result, truth in zip(results, truths, strict=True):
        if truth.numel():
            difference = result.detach().to(truth.dtype, copy=True).sub_(truth).abs_().max()
            error = float(difference / truth.abs().max().clamp_min(torch.finfo(truth.dtype).tiny))
            worst = error if math.isnan(error) else max(worst, error)
        if math.isnan(worst):
            break
    return worst
