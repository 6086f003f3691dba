"""Buffers of a model that its forward writes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch


class _BufferThread(threading.local):
    runs_again: bool = False


@dataclass(frozen=True)
class _Call:
    """A call that runs.

    Attributes:
        writes: what is written when it ends, as (buffer, value).
        before: what it reads in the place of buffers that it writes, by the buffers' ids.
        buffers: those buffers, by the ids of what is read in their place.
    """

    writes: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    before: dict[int, torch.Tensor] = field(default_factory=dict)
    buffers: dict[int, torch.Tensor] = field(default_factory=dict)


_thread = _BufferThread()
#: The current calls, the innermost last. The backward pass has threads of its own, which write nothing.
_calls: list[_Call] = []


@contextlib.contextmanager
def running_again() -> Iterator[None]:
    """What runs inside is repeated for the backward pass: it writes no buffers."""
    before, _thread.runs_again = _thread.runs_again, True
    try:
        yield
    finally:
        _thread.runs_again = before


@contextlib.contextmanager
def stored_at_end(read_later: Sequence[torch.Tensor] = ()) -> Iterator[None]:
    """What runs inside reads buffers as they were before, also where it is repeated; if it fails they stay so.

    Args:
        read_later: buffers that the call writes and whose values before it a later backward pass reads, or what it
            repeats: copies of them stand in their place (``values_before``).
    """
    call = _Call()
    for buffer in read_later:
        before = call.before[id(buffer)] = buffer.detach().clone()
        call.buffers[id(before)] = buffer
    _calls.append(call)
    try:
        yield
    finally:
        _calls.pop()
    for buffer, value in call.writes:
        _write(buffer, value)


def values_before() -> Mapping[int, torch.Tensor]:
    """What the current call reads in the place of buffers, by the buffers' ids."""
    return _calls[-1].before if _calls else {}


def store(buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Write ``value`` into a buffer of the model, in place, once a step however often its unit runs."""
    if not _thread.runs_again:
        if _calls:
            call = _calls[-1]
            call.writes.append((call.buffers.get(id(buffer), buffer), value.detach()))
        else:
            _write(buffer, value)
    return buffer


@torch.no_grad()
def _write(buffer: torch.Tensor, value: torch.Tensor) -> None:
    buffer.copy_(value)
