"""The page of a sweep: one self-contained HTML file with charts by Bokeh, the table, and links to the plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from cost_models.text import counted
from passes.plan.text_tables import format_seconds
from planner.inspection.html_report.headline import Card
from planner.inspection.html_report.report_page import page_parts, page_template
from planner.sweeps.study import Study
from planner.sweeps.sweep_charts import sweep_charts
from planner.sweeps.sweep_row import SweepRow
from planner.sweeps.sweep_table import FEWEST_HEADER, as_texts, fewest_devices, fewest_texts

_FOLDER = Path(__file__).parent


def sweep_page(study: Study, rows: Sequence[SweepRow]) -> str:
    """The HTML of a sweep."""
    charts = list(sweep_charts(study, rows))
    header, cells = as_texts(study, rows)
    return page_template(_FOLDER, "sweep.html.jinja").render(  # type: ignore[no-any-return]
        title=study.title,
        cards=list(_cards(rows)),
        charts=charts,
        header=header,
        cells=cells,
        plan_column=header.index("plan") if "plan" in header else -1,
        fewest_header=FEWEST_HEADER,
        fewest=fewest_texts(fewest_devices(study, rows)),
        errors=[row for row in rows if row.error is not None],
        **page_parts({chart.name: chart.figure for chart in charts}),
    )


def _cards(rows: Sequence[SweepRow]) -> Iterator[Card]:
    planned = [row for row in rows if row.error is None]
    models = {row.request.model for row in rows}
    clusters = {row.request.cluster for row in rows}
    yield Card("Rows", f"{len(rows):,}", f"{counted(len(models), 'model')}, {counted(len(clusters), 'cluster')}")
    yield Card("Without a plan", f"{len(rows) - len(planned):,}", "each with its reason below")
    if planned:
        widest = max(planned, key=lambda row: row.figure("gap"))
        where = f"{widest.request.model} on {widest.request.cluster}"
        yield Card("Largest gap", f"{widest.figure('gap'):.2%}", where)
    seconds = sum(row.planning_seconds for row in rows)
    yield Card(
        "Planning", format_seconds(seconds), f"processor time; {format_seconds(seconds / max(1, len(rows)))} a row"
    )
