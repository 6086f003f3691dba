"""What a plan costs to run, in money and days: its throughput, the number of devices, and a price for one of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from passes.plan import Plan
from passes.plan.serving import ServingPlan
from passes.plan.step_summary import tokens_per_sample

_HOURS_A_DAY, _SECONDS_AN_HOUR = 24.0, 3600.0


@dataclass(frozen=True)
class RunningCost:
    """Costs in whatever currency the price of a device-hour is.

    Attributes:
        unit: what is counted: ``"tokens"``, or ``"samples"`` of a model whose samples have none; ``"new tokens"`` where
            text is generated.
        rate: of them, by the second, on all devices, without failures and evaluations.
        per_million: the cost of a million of them.
        per_day: the cost of all devices for a day.
    """

    unit: str
    rate: float
    per_million: float
    per_day: float


def running_cost(plan: Plan | ServingPlan, device_hour_price: float) -> RunningCost:
    """The costs of a plan whose devices cost ``device_hour_price`` an hour each."""
    if isinstance(plan, ServingPlan):
        unit, rate, num_devices = "new tokens", plan.tokens_per_second, plan.mesh.num_devices
    else:
        tokens = tokens_per_sample(plan)
        unit, rate = "tokens" if tokens else "samples", plan.step.costs.samples_per_second * (tokens or 1)
        num_devices = plan.step.num_devices
    hourly = num_devices * device_hour_price
    per_million = hourly / _SECONDS_AN_HOUR / rate * 1e6 if rate else 0.0
    return RunningCost(unit, rate, per_million, hourly * _HOURS_A_DAY)


def cost_lines(plan: Plan | ServingPlan, *, device_hour_price: float | None, total: int | None) -> Iterator[str]:
    """Lines on what running costs: by the million and by the day, and of ``total`` tokens (or samples).

    Example:
        >>> print(*cost_lines(plan, device_hour_price=2.5, total=15 * 10**12), sep="\\n")
        0.2711 per million tokens, 122,880 a day, at 2.5 per device-hour
        15,000,000,000,000 tokens take 33.1 days without a failure and cost 4,066,500
    """
    cost = running_cost(plan, device_hour_price or 0.0)
    if device_hour_price is not None:
        yield (
            f"{cost.per_million:,.4g} per million {cost.unit}, {_amount(cost.per_day)} a day, at "
            f"{device_hour_price:g} per device-hour"
        )
    if total is not None:
        days = total / cost.rate / _SECONDS_AN_HOUR / _HOURS_A_DAY if cost.rate else 0.0
        price = f" and cost {_amount(days * cost.per_day)}" if device_hour_price is not None else ""
        took = f"{days:,.1f}" if days >= 10.0 else f"{days:.3g}"
        yield f"{total:,} {cost.unit} take {took} days without a failure{price}"


def _amount(money: float) -> str:
    """Money as text, cents where there are less than a hundred."""
    return f"{money:,.0f}" if money >= 100.0 else f"{money:.4g}"
