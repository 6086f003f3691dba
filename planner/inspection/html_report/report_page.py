"""The report of a plan: one self-contained HTML file, with charts by Bokeh and text by Jinja2.

Whatever stands in the page comes from the plan; its names are a model's or a stranger's file's, and Jinja2 escapes
each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cost_models.files import write_text
from cost_models.text import counted
from passes.plan import Plan
from planner.inspection.baseline_comparison import ComparedLayout
from planner.inspection.html_report.assumption_table import assumption_rows
from planner.inspection.html_report.cluster_section import cluster_section
from planner.inspection.html_report.headline import headline
from planner.inspection.html_report.memory_chart import memory_section
from planner.inspection.html_report.model_tree import model_tree
from planner.inspection.html_report.pipeline_chart import pipeline_section
from planner.inspection.html_report.plan_tables import (
    break_even_rows,
    collective_rows,
    layout_rows,
    runner_up_rows,
)
from planner.inspection.html_report.waterfall_chart import waterfall_section
from planner.inspection.robustness import BreakEven
from planner.inspection.simulated_step import simulated_step

_FOLDER = Path(__file__).parent


def write_report(plan: Plan, path: str | Path, **options: Any) -> None:
    """Write the report of ``plan`` as HTML; options and errors as ``report_page``.

    Raises:
        ValueError: if ``path`` cannot be written.

    Example:
        >>> write_report(planner.Plan.load("plan.json"), "plan.html", device_hour_price=2.5)
    """
    write_text(path, report_page(plan, **options))


def report_page(
    plan: Plan,
    *,
    device_hour_price: float | None = None,
    source: str | Mapping[str, str] | None = None,
    break_evens: Sequence[BreakEven] = (),
    layouts: Sequence[ComparedLayout] = (),
) -> str:
    """The report's HTML.

    Args:
        device_hour_price: what one device costs an hour, in any currency; adds the cost per million tokens.
        source: the emitted program, or those of all chunks by name (``emitted_sources``), to stand beside the model.
        break_evens: what ``robustness`` says of the plan; ``layouts``: what ``compare`` does.

    Raises:
        ValueError: if the price is negative, or the plan's step does not play in the seconds that it states.
    """
    check_price(device_hour_price)
    report = simulated_step(plan)
    sections: dict[str, Any] = {
        "waterfall": waterfall_section(plan, report),
        "pipeline": pipeline_section(plan, report),
        "memory": memory_section(plan, report),
        "cluster": cluster_section(plan),
    }
    charts = {name: section.chart for name, section in sections.items() if section.chart is not None}
    return page_template(_FOLDER, "report.html.jinja").render(  # type: ignore[no-any-return]
        plan=plan,
        title=f"{plan.model} on {counted(plan.step.num_devices, 'device')}",
        cards=headline(plan, device_hour_price=device_hour_price),
        sections=sections,
        **page_parts(charts),
        behaviour=(_FOLDER / "report.js").read_text(encoding="utf-8"),
        collectives=collective_rows(plan),
        runners_up=runner_up_rows(plan),
        assumptions=assumption_rows(plan),
        tree=model_tree(plan),
        sources={"The emitted program": source} if isinstance(source, str) else dict(source or {}),
        break_evens=break_even_rows(break_evens),
        layouts=layout_rows(plan, layouts),
    )


def check_price(device_hour_price: float | None) -> None:
    """Raise ValueError for a price below zero."""
    if device_hour_price is not None and not device_hour_price >= 0.0:
        raise ValueError(f"device_hour_price: expected a price of at least 0, got {device_hour_price!r}")


def page_parts(charts: Mapping[str, Any]) -> dict[str, Any]:
    """What a page with Bokeh charts has in it: the charts, Bokeh itself, the style, and the script of the theme."""
    from bokeh.embed import components
    from bokeh.resources import Resources

    script, divs = components(dict(charts)) if charts else ("", {})
    return {
        "divs": divs,
        "chart_script": script,
        "library": Resources(mode="inline", components=["bokeh"]).render_js(),
        "style": (_FOLDER / "report.css").read_text(encoding="utf-8"),
        "theme": (_FOLDER / "theme.js").read_text(encoding="utf-8"),
    }


def page_template(folder: Path, name: str) -> Any:
    """The Jinja2 template ``name`` in ``folder``, which escapes all that is put into it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(folder)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template(name)
