"""Memory of each pipeline rank over the step, stacked by what it is for."""

from __future__ import annotations

import itertools
from typing import Any

from cost_models.simulator import StepReport
from passes.plan import Plan
from passes.plan.text_tables import format_bytes
from planner.inspection.html_report.report_section import (
    COLOURS,
    ReportSection,
    plain_figure,
    with_legend_below,
    with_short_seconds,
)
from planner.inspection.memory_curves import PARTS, MemoryCurve, memory_curves

_GIB = 2.0**30
_COLOURS = dict(zip(PARTS, ("blue", "sky", "green", "grey", "orange", "red")))
#: Points of a curve that a reader can tell apart on a wide screen; of more, each stretch shows its fullest moment.
MAX_POINTS = 1200


def memory_section(plan: Plan, report: StepReport) -> ReportSection:
    """A stacked chart of one rank at a time (first the fullest), and the parts of each rank at its fullest moment."""
    curves = memory_curves(plan, report)
    rows = []
    for curve in curves:
        totals = [sum(amounts) for amounts in zip(*curve.parts.values())]
        peak = totals.index(max(totals))
        cells = [format_bytes(curve.parts[part][peak]) for part in PARTS]
        limit = plan.step.memory_limit_of(curve.rank)
        name = plan.step.rank_name(curve.rank)
        rows.append([name, *cells, format_bytes(totals[peak]), _share(totals[peak], limit)])
    fullest = max(
        curves, key=lambda curve: (curve.peak_bytes / (plan.step.memory_limit_of(curve.rank) or 1.0), curve.peak_bytes)
    )
    summary = (
        f"Rank {fullest.rank} is the fullest: {format_bytes(fullest.peak_bytes)} of the "
        f"{format_bytes(plan.step.memory_limit_of(fullest.rank))} that tensors may take."
    )
    return ReportSection(
        summary,
        ("pipeline rank", *PARTS, "at its peak", "full"),
        rows,
        _charts(plan, curves, fullest.rank),
        choices=[f"{curve.rank}: {format_bytes(curve.peak_bytes)}" for curve in curves] if len(curves) > 1 else [],
        chosen=fullest.rank,
    )


def _charts(plan: Plan, curves: tuple[MemoryCurve, ...], first: int) -> Any:
    """The chart of rank ``first``; the page's script puts another rank's curve, which its tags have, in its place."""
    shown = _source(curves[first])
    shown.name = "memory"
    chart = _chart(plan, shown, max(curve.peak_bytes for curve in curves))
    if len(curves) > 1:
        shown.tags = [_source(curve) for curve in curves]
    return chart


def _source(curve: MemoryCurve) -> Any:
    import numpy
    from bokeh.models import ColumnDataSource

    places = _shown(curve)
    columns = {"seconds": numpy.array([curve.seconds[place] for place in places])}
    for part in PARTS:
        columns[part] = numpy.array([curve.parts[part][place] / _GIB for place in places])
    return ColumnDataSource(columns)


def _chart(plan: Plan, source: Any, most: float) -> Any:
    """The chart of ``source``; ``most``: bytes of the fullest rank."""
    chart = plain_figure(
        height=320, x_axis_label="seconds", y_axis_label="GiB", tools="xpan,xwheel_zoom,xbox_zoom,reset,save",
        active_scroll=None,
    )  # fmt: skip
    colours = [COLOURS[_COLOURS[part]] for part in PARTS]
    chart.varea_stack(list(PARTS), x="seconds", color=colours, source=source, legend_label=list(PARTS))
    if plan.step.memory_limit < float("inf"):
        limit = plan.step.memory_limit / _GIB
        limits = sorted({device.memory_limit / _GIB for device in plan.step.stage_devices} or {limit})
        chart.hspan(y=limits, line_dash="dashed", line_color=COLOURS["red"])
        chart.y_range.start, chart.y_range.end = 0.0, 1.05 * max(limit, most / _GIB)
    return with_legend_below(with_short_seconds(chart))


def _shown(curve: MemoryCurve) -> list[int]:
    """Places of the curve to draw: all, or of each of ``MAX_POINTS`` stretches the fullest."""
    count = len(curve.seconds)
    if count <= MAX_POINTS:
        return list(range(count))
    totals = [sum(amounts) for amounts in zip(*curve.parts.values())]
    bounds = [count * index // MAX_POINTS for index in range(MAX_POINTS + 1)]
    return [max(range(low, high), key=totals.__getitem__) for low, high in itertools.pairwise(bounds)]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""
