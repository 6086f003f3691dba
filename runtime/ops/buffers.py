"""Buffers of a model that its forward writes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class _BufferThread(threading.local):
    runs_again: bool = False


_thread = _BufferThread()
#: Pending writes of the current call, applied when it ends; None outside of calls. The backward pass has
#: threads of its own, which write nothing.
_waiting: list[list[tuple[torch.Tensor, torch.Tensor]]] = []


@contextlib.contextmanager
def running_again() -> Iterator[None]:
    """What runs inside is repeated for the backward pass: it writes no buffers."""
    before, _thread.runs_again = _thread.runs_again, True
    try:
        yield
    finally:
        _thread.runs_again = before


@contextlib.contextmanager
def stored_at_end() -> Iterator[None]:
    """What runs inside reads buffers as they were before, also where it is repeated; if it fails they stay so."""
    writes: list[tuple[torch.Tensor, torch.Tensor]] = []
    _waiting.append(writes)
    try:
        yield
    finally:
        _waiting.pop()
    for buffer, value in writes:
        _write(buffer, value)


def store(buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Write ``value`` into a buffer of the model, in place, once a step however often its unit runs."""
    if not _thread.runs_again:
        if _waiting:
            _waiting[-1].append((buffer, value.detach()))
        else:
            _write(buffer, value)
    return buffer


@torch.no_grad()
def _write(buffer: torch.Tensor, value: torch.Tensor) -> None:
    buffer.copy_(value)
