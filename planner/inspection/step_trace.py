"""A simulated step as a trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cost_models.files import write_text
from cost_models.simulator import StepReport
from passes.plan import Plan
from passes.plan.step_tracks import MICROSECONDS, span_event, track_names
from planner.inspection.memory_curves import memory_curves
from planner.inspection.simulated_step import simulated_step


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
        yield from track_names(rank, f"pipeline rank {plan.step.rank_name(rank)}")
    for event in report.timeline or ():
        yield span_event(event.rank, event.stream, event.label, event.start, event.end - event.start)
    for curve in memory_curves(plan, report):
        for index, seconds in enumerate(curve.seconds):
            held = {name: amounts[index] for name, amounts in curve.parts.items()}
            yield {"ph": "C", "name": "bytes", "pid": curve.rank, "ts": seconds * MICROSECONDS, "args": held}
