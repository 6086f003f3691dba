"""Whether some of a cluster's unequal devices would be faster without the others.

A plan uses all devices. Where others are much slower (in this dtype, say) or lie behind a slow link, what they take
over may be worth less than what it costs to give it to them.
"""

from __future__ import annotations

from collections.abc import Callable

from cost_models import Cluster
from cost_models.unequal_devices import device_kinds, view
from passes.plan import Plan
from passes.plan.step_summary import FASTER_ALONE
from passes.plan.text_tables import format_seconds

#: What devices alone must save for it to be said: a search might stop this far above the best plan.
_LEAST_SAVING = 0.01


def faster_alone(plan: Plan, cluster: Cluster, plan_on: Callable[[Cluster], Plan | None]) -> str | None:
    """What there is to say of the kind of devices that is fastest alone; None if none is faster than ``plan``.

    Args:
        plan_on: the fastest plan on a cluster of equal devices, None if nothing fits.
    """
    kinds = device_kinds(cluster)
    alone = []
    for index, kind in enumerate(kinds):
        plan_alone = plan_on(view(cluster, kinds, (index,)).subset(kind.count))
        if plan_alone is not None:
            alone.append((plan_alone.step.costs.simulated, kind))
    together = plan.step.costs.simulated
    faster = [each for each in alone if each[0] < together * (1.0 - _LEAST_SAVING)]
    if not faster:
        return None
    seconds, kind = min(faster, key=lambda each: each[0])
    return (
        f"{FASTER_ALONE}{kind.count} × {kind.device.name}, {format_seconds(seconds)} a step "
        f"({seconds / together - 1.0:+.1%})"
    )
