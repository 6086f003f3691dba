"""A part of the report that has a chart: the chart for the eye, the same figures as a table for everybody else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ReportSection:
    """A chart with its figures in words and as a table.

    Attributes:
        chart: a Bokeh model; ``summary`` says in words what it shows, ``rows`` are its figures.
        choices: pipeline ranks to choose from, of which the chart shows one; ``chosen`` is the first's index.
    """

    summary: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    chart: Any = None
    choices: Sequence[str] = ()
    chosen: int = 0


#: Colours that stand out on light and on dark, and from each other for colour-blind readers (Okabe and Ito 2008).
COLOURS = {
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "blue": "#0072B2",
    "red": "#D55E00",
    "pink": "#CC79A7",
    "grey": "#8A8F98",
}


def plain_figure(**options: Any) -> Any:
    """A Bokeh figure without a background of its own, as wide as the page."""
    from bokeh.plotting import figure

    chart = figure(sizing_mode="stretch_width", toolbar_location="above", **options)
    chart.background_fill_alpha = chart.border_fill_alpha = 0.0
    chart.outline_line_color = None
    chart.xgrid.grid_line_alpha = chart.ygrid.grid_line_alpha = 0.25
    chart.toolbar.logo = None
    return chart


def with_short_seconds(chart: Any) -> Any:
    """``chart`` with few marks on its axis of seconds, without powers of ten: a phone has room for them."""
    chart.xaxis.ticker.desired_num_ticks = 4
    chart.xaxis.formatter.use_scientific = False
    return chart


def with_legend_below(chart: Any, *, columns: int = 2) -> Any:
    """``chart`` with its legend under it, in so many columns that a narrow screen has room for them."""
    chart.add_layout(chart.legend[0], "below")
    chart.legend.ncols = columns
    chart.legend.background_fill_alpha = 0.0
    chart.legend.border_line_color = None
    return chart
