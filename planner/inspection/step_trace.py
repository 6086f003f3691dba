"""A simulated step in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format: Trace Event Format, Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
(complete events ``X``, counters ``C``, metadata ``M``; times in microseconds).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cost_models.files import write_text
from cost_models.simulator import Event, StepReport
from passes.plan import Plan
from planner.inspection.memory_curves import memory_curves
from planner.inspection.simulated_step import simulated_step

_MICROSECONDS = 1e6
#: Thread of each stream, in the order in which they are shown.
STREAMS = ("compute", "receive", "communication")


def write_trace(plan: Plan, path: str | Path) -> None:
    """Write the plan's simulated step as JSON: a process for each pipeline rank, a thread for each stream.

    Raises:
        ValueError: as ``simulated_step``, or if ``path`` cannot be written.
    """
    events = list(trace_events(plan, simulated_step(plan)))
    metadata = {"model": plan.model, "cluster": plan.cluster.get("name", ""), "mesh": plan.step.axes}
    document = {"displayTimeUnit": "ms", "otherData": metadata, "traceEvents": events}
    write_text(path, json.dumps(document, separators=(",", ":")) + "\n")


def trace_events(plan: Plan, report: StepReport) -> Iterator[dict[str, Any]]:
    """Events of all ranks in order of rank and time."""
    for rank in range(len(report.ranks)):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"pipeline rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for thread, stream in enumerate(STREAMS):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": stream}}
    yield from map(_complete_event, report.timeline or ())
    for curve in memory_curves(plan, report):
        for index, seconds in enumerate(curve.seconds):
            held = {name: amounts[index] for name, amounts in curve.parts.items()}
            yield {"ph": "C", "name": "bytes", "pid": curve.rank, "ts": seconds * _MICROSECONDS, "args": held}


def _complete_event(event: Event) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": event.label,
        "cat": event.stream,
        "pid": event.rank,
        "tid": STREAMS.index(event.stream),
        "ts": event.start * _MICROSECONDS,
        "dur": (event.end - event.start) * _MICROSECONDS,
    }
