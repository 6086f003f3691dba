"""The report of a plan of generating text: one self-contained HTML file, made of the parts that a step's report has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cost_models.text import counted
from passes.plan.serving import ServingPlan
from passes.plan.text_tables import format_bytes, format_rate, format_seconds
from planner.inspection.html_report.assumption_table import assumption_rows
from planner.inspection.html_report.cluster_section import cluster_section
from planner.inspection.html_report.headline import Card
from planner.inspection.html_report.model_tree import model_tree
from planner.inspection.html_report.plan_tables import collective_rows
from planner.inspection.html_report.report_page import check_price, page_parts, page_template
from planner.inspection.running_cost import running_cost

_FOLDER = Path(__file__).parent


def serving_page(plan: ServingPlan, *, device_hour_price: float | None = None) -> str:
    """The report's HTML; ``device_hour_price`` adds the cost per million new tokens.

    Raises:
        ValueError: if the price is negative.
    """
    check_price(device_hour_price)
    cluster = cluster_section(plan.token)
    tokens = f"{counted(plan.batch, 'sample')} of {plan.prompt_len:,} + {plan.new_tokens:,} tokens"
    return page_template(_FOLDER, "serving.html.jinja").render(  # type: ignore[no-any-return]
        title=f"{plan.token.model} generating text on {counted(plan.mesh.num_devices, 'device')}",
        subtitle=f"{plan.token.cluster.get('name', '')} · {tokens} at once",
        cards=tuple(_cards(plan, device_hour_price)),
        phases=list(_phase_rows(plan)),
        sections={"cluster": cluster},
        **page_parts({} if cluster.chart is None else {"cluster": cluster.chart}),
        behaviour=(_FOLDER / "report.js").read_text(encoding="utf-8"),
        collectives={phase: collective_rows(each) for phase, each in plan.phases.items()},
        trees={phase: model_tree(each) for phase, each in plan.phases.items()},
        assumptions=assumption_rows(plan.token),
    )


def _cards(plan: ServingPlan, price: float | None) -> Iterator[Card]:
    first, each = format_seconds(plan.first_token_seconds), format_seconds(plan.token_seconds)
    yield Card("First token", first, f"bound {format_seconds(plan.first_token_bound)}")
    yield Card("Each token", each, f"bound {format_seconds(plan.token_bound)}")
    yield Card("Whole answer", format_seconds(plan.seconds), f"{plan.new_tokens:,} tokens of {plan.batch:,} samples")
    rate = plan.tokens_per_second
    yield Card("Tokens per second", format_rate(rate), f"{format_rate(rate / plan.mesh.num_devices)} a device")
    yield Card("Devices", f"{plan.mesh.num_devices:,}", f"{plan.mesh} of {plan.token.cluster.get('name', '')}")
    limit = plan.token.step.memory_limit
    share = f", of {format_bytes(limit)}" if limit else ""
    remark = f"weights {format_bytes(plan.weight_bytes)}, cache {format_bytes(plan.cache_bytes)}{share}"
    yield Card("On a device", format_bytes(plan.device_bytes), remark)
    if price is not None:
        cost = running_cost(plan, price)
        remark = f"at {price:g} per device-hour; {cost.per_day:,.0f} a day"
        yield Card(f"Cost per million {cost.unit}", f"{cost.per_million:,.4g}", remark)


def _phase_rows(plan: ServingPlan) -> Iterator[list[str]]:
    """Of the prompt and of a token: how often it runs in an answer, its seconds by part, and bounds."""
    runs = {"prompt": "once", "token": f"{plan.new_tokens - 1:,} times"}
    bounds = {"prompt": plan.first_token_bound, "token": plan.token_bound}
    for phase, each in plan.phases.items():
        costs = each.costs
        parts = (costs.total, costs.compute_forward, costs.communication_forward, bounds[phase], each.certificate.bound)
        yield [phase, runs[phase], *map(format_seconds, parts)]
