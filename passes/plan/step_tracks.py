"""Tracks of a step's trace, simulated or measured: a process for each rank, a thread for each stream.

The format: Trace Event Format, Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
(complete events ``X``, counters ``C``, metadata ``M``; times in microseconds), which Perfetto (ui.perfetto.dev) opens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: Thread of each stream, in the order in which they are shown.
STREAMS = ("compute", "receive", "communication")
MICROSECONDS = 1e6


def track_names(process: int, name: str) -> Iterator[dict[str, Any]]:
    """Metadata events of one rank's tracks."""
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for thread, stream in enumerate(STREAMS):
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": stream}}


def span_event(process: int, stream: str, label: str, start: float, duration: float) -> dict[str, Any]:
    """An event of ``duration`` seconds from second ``start`` on."""
    return {
        "ph": "X",
        "name": label,
        "cat": stream,
        "pid": process,
        "tid": STREAMS.index(stream),
        "ts": start * MICROSECONDS,
        "dur": duration * MICROSECONDS,
    }
