"""The simulated step as a Gantt chart: every pipeline rank's streams over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from cost_models.simulator import Event, StepReport
from cost_models.text import counted
from passes.plan import Plan
from passes.plan.text_tables import format_seconds
from planner.inspection.html_report.report_section import (
    COLOURS,
    ReportSection,
    plain_figure,
    with_legend_below,
    with_short_seconds,
)

#: First letters of an event's label → what it is, and its colour. Zero-bubble schedules split backward into I and W.
KINDS = {
    "F": ("forward", COLOURS["sky"]),
    "B": ("backward", COLOURS["blue"]),
    "I": ("backward of inputs", COLOURS["blue"]),
    "W": ("backward of weights", COLOURS["green"]),
    "update": ("optimizer", COLOURS["pink"]),
}
_COMMUNICATION = ("gathers and reductions", COLOURS["orange"])
_RECEIVE = ("receiving", COLOURS["red"])
#: Where in a rank's row each stream lies: (bottom, top) of a row of height 1.
_LANES = {"compute": (0.35, 0.95), "receive": (0.35, 0.95), "communication": (0.08, 0.3)}

#: Pixels that the legend takes below the chart.
LEGEND_HEIGHT = 80


def pipeline_section(plan: Plan, report: StepReport) -> ReportSection:
    """All ranks over one step; what is left free in a row is the bubble."""
    step = plan.step
    rows = [
        [
            step.rank_name(rank),
            format_seconds(played.compute_seconds),
            format_seconds(played.exposed_seconds),
            format_seconds(played.bubble_seconds),
            f"{played.bubble_fraction:.1%}",
        ]
        for rank, played in enumerate(report.ranks)
    ]
    schedule = "no pipeline" if len(report.ranks) == 1 else f"schedule {step.schedule}"
    summary = (
        f"{len(report.ranks)} pipeline ranks, {counted(step.num_microbatches, 'micro-batch')}, {schedule}: on average "
        f"{report.bubble_fraction:.1%} of a rank's time is spent waiting for other ranks, {report.exposed_share:.1%} "
        "waiting for communication."
    )
    header = ("pipeline rank", "computes", "waits for communication", "waits for other ranks", "bubble")
    return ReportSection(summary, header, rows, _chart(report) if report.seconds else None)


def joined(events: Iterable[Event]) -> Iterator[Event]:
    """Events of one action on one stream of a rank that follow each other without a gap, as one event."""
    last: dict[tuple[int, str], Event] = {}
    for event in events:
        key = (event.rank, event.stream)
        before = last.get(key)
        if before is not None and before.label == event.label and event.start <= before.end * (1.0 + 1e-12):
            last[key] = before._replace(end=event.end)
            continue
        if before is not None:
            yield before
        last[key] = event
    yield from last.values()


def kind_of_event(event: Event) -> tuple[str, str]:
    """What an event is, and its colour."""
    if event.stream == "communication":
        return _COMMUNICATION
    if event.stream == "receive":
        return _RECEIVE
    return KINDS.get(event.label, KINDS.get(event.label[:1], ("compute", COLOURS["grey"])))


def _chart(report: StepReport) -> Any:
    import numpy
    from bokeh.models import ColumnDataSource, HoverTool, Range1d

    events = list(joined(report.timeline or ()))
    num_ranks = len(report.ranks)
    chart = plain_figure(
        height=LEGEND_HEIGHT + max(130, min(640, 28 * num_ranks + 90)),
        x_range=Range1d(start=0.0, end=report.seconds, bounds=(0.0, report.seconds)),
        y_range=Range1d(start=num_ranks, end=0.0),
        x_axis_label="seconds",
        y_axis_label="pipeline rank",
        tools="xpan,xwheel_zoom,xbox_zoom,reset,save",
        active_scroll=None,
        output_backend="canvas",
    )
    chart.yaxis.ticker = [rank + 0.5 for rank in range(num_ranks)]
    chart.yaxis.major_label_overrides = {rank + 0.5: str(rank) for rank in range(num_ranks)}
    by_kind: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        by_kind.setdefault(kind_of_event(event), []).append(event)
    for (name, colour), of_kind in by_kind.items():
        lanes = [_LANES[event.stream] for event in of_kind]
        source = ColumnDataSource(
            {
                "left": numpy.array([event.start for event in of_kind]),
                "right": numpy.array([event.end for event in of_kind]),
                "top": numpy.array([event.rank + 1 - high for event, (_, high) in zip(of_kind, lanes)]),
                "bottom": numpy.array([event.rank + 1 - low for event, (low, _) in zip(of_kind, lanes)]),
                "label": [event.label for event in of_kind],
                "seconds": [format_seconds(event.end - event.start) for event in of_kind],
            }
        )
        chart.quad(
            "left", "right", "top", "bottom", source=source, fill_color=colour, line_color=None, legend_label=name
        )
    chart.add_tools(HoverTool(tooltips=[("", "@label"), ("takes", "@seconds"), ("from", "@left s")]))
    return with_legend_below(with_short_seconds(chart))
