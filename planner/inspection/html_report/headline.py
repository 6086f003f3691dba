"""The report's first figures: what a step takes, yields and costs, and how good the plan is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from passes.plan import Plan
from passes.plan.step_summary import tokens_per_sample
from passes.plan.text_tables import (
    format_bytes,
    format_bytes_between,
    format_rate,
    format_seconds,
    format_seconds_between,
)
from planner.inspection.running_cost import running_cost


class Card(NamedTuple):
    """One figure: what it is, the figure, and a line on it."""

    name: str
    figure: str
    remark: str = ""


def headline(plan: Plan, *, device_hour_price: float | None) -> tuple[Card, ...]:
    """Step time, throughput, utilisation, devices, memory, bound and gap; with a price the cost per million tokens."""
    return tuple(_cards(plan, device_hour_price))


def _cards(plan: Plan, price: float | None) -> Iterator[Card]:
    step, costs, certificate = plan.step, plan.step.costs, plan.certificate
    runs = "steps, as the cluster was measured" if plan.cluster.get("profile") else "runs published of such devices"
    covered = f"; in brackets, nine of ten {runs}" if step.interval else ""
    yield Card(
        "Step",
        format_seconds_between(costs.simulated, step.interval),
        f"simulated; closed form {format_seconds(costs.seconds)}{covered}",
    )
    tokens = tokens_per_sample(plan)
    name, rate = ("tokens", costs.samples_per_second * tokens) if tokens else ("samples", costs.samples_per_second)
    yield Card(f"{name.capitalize()} per second", format_rate(rate), f"{format_rate(rate / step.num_devices)} a device")
    yield Card("Model flops utilisation", f"{costs.utilisation:.1%}", f"{costs.flops:.4g} flops a step")
    axes = ", ".join(f"{axis}={size}" for axis, size in step.axes.items())
    yield Card("Devices", f"{step.num_devices:,}", f"{axes} of {plan.cluster.get('name', 'an unnamed cluster')}")
    fullest, limit = step.memory[step.fullest_rank].total, step.memory_limit_of(step.fullest_rank)
    share = f"{fullest / limit:.1%} of {format_bytes(limit)}" if limit else ""
    filled = "; in brackets, nine of ten plans that filled such devices" if step.memory_interval else ""
    yield Card("Fullest device", format_bytes_between(fullest, step.memory_interval), share + filled)
    least = format_seconds(certificate.bound)
    yield Card("Gap", f"{certificate.gap:.2%}", f"by the objective no plan searched takes less than {least}")
    if price is not None:
        cost = running_cost(plan, price)
        remark = f"at {price:g} per device-hour; {cost.per_day:,.0f} a day"
        yield Card(f"Cost per million {name}", f"{cost.per_million:,.4g}", remark)
