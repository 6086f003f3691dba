"""Charts of a sweep by Bokeh: a bar a row for each figure, curves over devices, and the front of cost and speed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cost_models.text import counted
from planner.inspection.html_report.report_section import COLOURS, plain_figure, with_legend_below
from planner.sweeps.study import Study
from planner.sweeps.sweep_row import SweepRow
from planner.sweeps.sweep_table import baseline_names_of, pareto_front

_PALETTE = tuple(COLOURS[name] for name in ("blue", "orange", "green", "red", "sky", "pink", "grey"))
#: One less than colours, so that what comes after all colours has other markers.
_MARKERS = ("circle", "square", "triangle", "diamond", "inverted_triangle", "star")
#: Pixels of a row: its name above, its bar or markers below, so that a phone has its width for both.
_ROW_HEIGHT = 40


@dataclass(frozen=True)
class SweepChart:
    """A Bokeh figure under a title, with what it shows in words."""

    name: str
    title: str
    summary: str
    figure: Any


@dataclass(frozen=True)
class _Metric:
    """A figure that has a bar in each row."""

    name: str
    title: str
    axis: str
    value: Callable[[SweepRow], float | None]
    summary: str


def sweep_charts(study: Study, rows: Sequence[SweepRow]) -> Iterator[SweepChart]:
    """All charts that the rows have figures for."""
    planned = [row for row in rows if row.error is None]
    if not planned:
        return
    labels = row_labels(planned)
    colours = dict(zip(dict.fromkeys(row.request.model for row in planned), itertools.cycle(_PALETTE)))
    for metric in _metrics(study):
        bars = [(label, row, metric.value(row)) for label, row in zip(labels, planned)]
        if any(value is not None for _, _, value in bars):
            yield SweepChart(metric.name, metric.title, metric.summary, _bars(bars, metric, colours))
    yield from _ratios(planned, labels)
    yield from _scaling(planned)
    yield from _front(study, planned, labels)


def row_labels(rows: Sequence[SweepRow]) -> list[str]:
    """A name for each row of what tells rows apart, each name once."""
    parts = [
        (
            row.request.model, row.request.cluster, f"{counted(row.num_devices, 'device')}",
            f"batch {row.request.global_batch:,}",
            "" if row.request.seq_len is None else f"length {row.request.seq_len:,}", row.request.options,
            row.request.layout,
        )
        for row in rows
    ]  # fmt: skip
    varies = [place < 2 or len({part[place] for part in parts}) > 1 for place in range(7)]
    labels = [" · ".join(text for text, shown in zip(part, varies) if shown and text) for part in parts]
    seen: dict[str, int] = {}
    unique = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        unique.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return unique


def _metrics(study: Study) -> Iterator[_Metric]:
    yield _Metric(
        "step", "Step time", "seconds", lambda row: row.figure("step_seconds"), "Seconds of one step, simulated."
    )
    yield _Metric(
        "memory", "Memory", "GiB of the fullest device", lambda row: row.figure("memory_bytes") / 2**30,
        "What the fullest device holds at its peak.",
    )  # fmt: skip
    yield _Metric(
        "gap", "Gap", "% of the objective", lambda row: 100.0 * row.figure("gap"),
        "How much faster another plan may be at most: the distance from the proved lower bound.",
    )  # fmt: skip
    if study.prices:
        yield _Metric(
            "cost", "Cost", "a million tokens (or a thousand samples)",
            lambda row: row.cost_per_million(study),
            "Devices × price × time, in the currency of the prices.",
        )  # fmt: skip
    yield _Metric(
        "planning", "Planning time", "processor seconds", lambda row: row.planning_seconds,
        "What planning the row took, with its baselines, and with capturing the model where no graph was kept.",
    )  # fmt: skip


def _rows_chart(labels: Sequence[str], **options: Any) -> Any:
    """A chart with a row for each label, from the top: row i lies around y = i, its label above it."""
    chart = plain_figure(
        y_range=(len(labels) - 0.5, -0.6), height=_ROW_HEIGHT * len(labels) + 80, tools="save,reset", **options
    )
    chart.yaxis.visible = chart.ygrid.visible = False
    chart.xaxis.ticker.desired_num_ticks = 4
    chart.min_border_left = 12
    return chart


def _write_labels(chart: Any, labels: Sequence[str], left: float) -> None:
    texts = chart.text(
        x=left, y=[place - 0.12 for place in range(len(labels))], text=labels, text_font_size="11px",
        text_baseline="bottom",
    )  # fmt: skip
    texts.glyph.tags = ["themed"]
    texts.level = "overlay"


def _bars(bars: Sequence[tuple[str, SweepRow, float | None]], metric: _Metric, colours: dict[str, str]) -> Any:
    from bokeh.models import ColumnDataSource, HoverTool

    shown = [(label, row, value) for label, row, value in bars if value is not None]
    source = ColumnDataSource(
        {
            "row": [label for label, _, _ in shown],
            "place": [place + 0.12 for place in range(len(shown))],
            "value": [value for _, _, value in shown],
            "text": [f"{value:,.4g}" for _, _, value in shown],
            "choice": [row.figure("choice") for _, row, _ in shown],
            "colour": [colours[row.request.model] for _, row, _ in shown],
        }
    )
    labels = [f"{label} · {value:,.4g}" for label, _, value in shown]
    chart = _rows_chart(labels, x_axis_label=metric.axis)
    chart.hbar(y="place", right="value", height=0.36, fill_color="colour", line_color=None, source=source)
    chart.x_range.start = 0
    _write_labels(chart, labels, 0.0)
    chart.add_tools(HoverTool(tooltips=[("", "@row"), (metric.axis, "@text"), ("choice", "@choice")]))
    return chart


def _ratios(rows: Sequence[SweepRow], labels: Sequence[str]) -> Iterator[SweepChart]:
    """How the plans stand beside experts' layouts, a marker for each baseline."""
    from bokeh.models import HoverTool, Range1d

    names = baseline_names_of(rows)
    compared = [(label, row) for label, row in zip(labels, rows) if any(row.ratio(name) is not None for name in names)]
    if not compared:
        return
    chart = _rows_chart([label for label, _ in compared], x_axis_label="seconds of the plan / seconds of the layout")
    for name, colour, marker in zip(names, itertools.cycle(_PALETTE), itertools.cycle(_MARKERS)):
        points = [
            (place, label, row.ratio(name))
            for place, (label, row) in enumerate(compared)
            if row.ratio(name) is not None
        ]
        if points:
            data = {
                "x": [ratio for _, _, ratio in points],
                "y": [place + 0.12 for place, _, _ in points],
                "row": [label for _, label, _ in points],
                "layout": [name] * len(points),
            }
            chart.scatter(x="x", y="y", marker=marker, size=9, color=colour, legend_label=name, source=data)
    chart.vspan(x=[1.0], line_color=COLOURS["grey"], line_dash="dashed")
    ratios = [ratio for _, row in compared for name in names if (ratio := row.ratio(name)) is not None]
    least, most = min(1.0, *ratios), max(1.0, *ratios)
    margin = 0.05 * (most - least) or 0.05
    chart.x_range = Range1d(start=least - margin, end=most + margin)
    _write_labels(chart, [label for label, _ in compared], least - margin)
    chart.add_tools(HoverTool(tooltips=[("", "@row"), ("over @layout", "@x{0.000}")]))
    summary = "Below 1 the plan is faster than the best that the expert's rules allow."
    yield SweepChart("ratios", "Beside experts' layouts", summary, with_legend_below(chart))


def _scaling(rows: Sequence[SweepRow]) -> Iterator[SweepChart]:
    """Throughput over devices, a curve for each series that has several numbers of devices."""
    from bokeh.models import HoverTool, NumeralTickFormatter

    curves: dict[tuple[str, ...], dict[int, SweepRow]] = {}
    for row in rows:
        curves.setdefault(row.series, {}).setdefault(row.num_devices, row)
    curves = {series: points for series, points in curves.items() if len(points) > 1}
    if not curves:
        return
    varies = [len(set(parts)) > 1 for parts in zip(*curves)]
    chart = plain_figure(
        height=380 + 20 * len(curves), x_axis_type="log", y_axis_type="log", x_axis_label="devices",
        y_axis_label="tokens/s (without tokens: samples/s)", tools="pan,wheel_zoom,save,reset",
    )  # fmt: skip
    for (series, points), colour, marker in zip(curves.items(), itertools.cycle(_PALETTE), itertools.cycle(_MARKERS)):
        sizes = sorted(points)
        rates = [points[size].rate[0] or 0.0 for size in sizes]
        label = " · ".join(part for part, shown in zip(series, varies) if part and shown) or series[0]
        data = {
            "devices": sizes,
            "rate": rates,
            "share": [rate / (rates[0] * size / sizes[0]) for rate, size in zip(rates, sizes)],
            "series": [label] * len(sizes),
            "choice": [points[size].figure("choice") for size in sizes],
        }
        chart.line(sizes, [rates[0] * size / sizes[0] for size in sizes], color=colour, line_dash="dotted", alpha=0.7)
        chart.line(x="devices", y="rate", color=colour, line_width=2, legend_label=label, source=data)
        chart.scatter(x="devices", y="rate", color=colour, marker=marker, size=8, legend_label=label, source=data)
    tips = [("", "@series"), ("devices", "@devices"), ("a second", "@rate{0,0.0}"), ("of linear", "@share{0.0%}"),
            ("choice", "@choice")]  # fmt: skip
    chart.add_tools(HoverTool(tooltips=tips))
    chart.yaxis.formatter = NumeralTickFormatter(format="0.[00]a")
    summary = "Throughput over devices; dotted: in proportion to the fewest devices of the curve."
    yield SweepChart("scaling", "Scaling", summary, with_legend_below(chart, columns=1))


def _front(study: Study, rows: Sequence[SweepRow], labels: Sequence[str]) -> Iterator[SweepChart]:
    """Cost against time of a million tokens; those that no other row beats in both are filled and joined."""
    from bokeh.models import HoverTool

    points = [
        (label, row, number / rate, cost)
        for label, row in zip(labels, rows)
        if (cost := row.cost_per_million(study)) is not None
        for rate, number in [row.rate]
        if rate
    ]
    if not points:
        return
    efficient = pareto_front(study, rows)
    chart = plain_figure(
        height=420, x_axis_type="log", y_axis_type="log", x_axis_label="seconds for a million tokens",
        y_axis_label="cost of a million tokens", tools="pan,wheel_zoom,save,reset",
    )  # fmt: skip
    groups: dict[tuple[Any, ...], list[tuple[str, SweepRow, float, float]]] = {}
    for point in points:
        groups.setdefault((point[1].request.model, point[1].request.seq_len), []).append(point)
    for (model, length), colour in zip(groups, itertools.cycle(_PALETTE)):
        group = sorted(groups[model, length], key=lambda point: point[2])
        label = model if length is None else f"{model}, length {length:,}"
        best = [point for point in group if id(point[1]) in efficient]
        chart.line([point[2] for point in best], [point[3] for point in best], color=colour, legend_label=label)
        data = {
            "seconds": [point[2] for point in group],
            "cost": [point[3] for point in group],
            "alpha": [0.9 if id(point[1]) in efficient else 0.0 for point in group],
            "row": [point[0] for point in group],
            "choice": [point[1].figure("choice") for point in group],
        }
        chart.scatter(
            x="seconds", y="cost", size=9, line_color=colour, fill_color=colour, fill_alpha="alpha", legend_label=label,
            source=data,
        )  # fmt: skip
    tips = [("", "@row"), ("seconds", "@seconds{0.000}"), ("cost", "@cost{0.0000}"), ("choice", "@choice")]
    chart.add_tools(HoverTool(tooltips=tips))
    summary = "Filled: no other row of the same model and length is both cheaper and faster."
    yield SweepChart("pareto", "Cost and time", summary, with_legend_below(chart))
