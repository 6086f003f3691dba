"""The waterfall from ideal compute to the simulated step."""

from __future__ import annotations

import textwrap
from itertools import accumulate
from typing import Any

from cost_models.simulator import StepReport
from passes.plan import Plan
from passes.plan.text_tables import format_seconds
from planner.inspection.html_report.report_section import COLOURS, ReportSection, plain_figure, with_short_seconds
from planner.inspection.time_waterfall import WaterfallBar, busiest_rank, waterfall

#: Characters of a line of a bar's name, so that a phone has room beside the names.
LABEL_WIDTH = 20
#: Pixels of a bar and the space above it: room for a name of three lines.
ROW_HEIGHT = 46


def waterfall_section(plan: Plan, report: StepReport) -> ReportSection:
    """A bar a cause, each from where the one before it ends; the last is the whole step."""
    bars = waterfall(plan, report)
    rows = [
        [bar.name, format_seconds(bar.seconds), _share(bar.seconds, report.seconds), bar.explanation] for bar in bars
    ]
    rows.append(["step", format_seconds(report.seconds), "100.0%", "as simulated"])
    largest = max(bars[1:], key=lambda bar: bar.seconds)
    summary = (
        f"A step of {format_seconds(report.seconds)}, of which {_share(bars[0].seconds, report.seconds)} are the "
        f"model's arithmetic at the devices' peak. Most of the rest: {largest.name}, "
        f"{format_seconds(largest.seconds)}. Seconds are those of pipeline rank {busiest_rank(report)}, "
        "which computes longest."
    )
    return ReportSection(summary, ("cause", "seconds", "share", "what it is"), rows, _chart(bars, report.seconds))


def _chart(bars: tuple[WaterfallBar, ...], total: float) -> Any:
    from bokeh.models import ColumnDataSource, HoverTool

    ends = list(accumulate(bar.seconds for bar in bars))
    names = [textwrap.fill(bar.name, LABEL_WIDTH) for bar in bars] + ["step"]
    first, rest, whole = COLOURS["green"], COLOURS["orange"], COLOURS["blue"]
    source = ColumnDataSource(
        {
            "name": names,
            "left": [0.0, *ends[:-1], 0.0],
            "right": [*ends, total],
            "seconds": [*(format_seconds(bar.seconds) for bar in bars), format_seconds(total)],
            "colour": [first, *[rest] * (len(bars) - 1), whole],
        }
    )
    chart = plain_figure(
        y_range=names[::-1], height=ROW_HEIGHT * len(names) + 60, x_axis_label="seconds of the step", tools="save,reset"
    )
    chart.hbar(y="name", left="left", right="right", height=0.7, fill_color="colour", line_color=None, source=source)
    chart.add_tools(HoverTool(tooltips=[("", "@name"), ("seconds", "@seconds")]))
    return with_short_seconds(chart)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""
