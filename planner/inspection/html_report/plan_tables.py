"""Tables of the report that have no chart: collectives, runners-up, and what the prices rest on."""

from __future__ import annotations

from collections.abc import Iterator

from cost_models import Cluster
from passes.plan import Plan
from passes.plan.text_tables import format_bytes, format_seconds


def collective_rows(plan: Plan) -> list[list[str]]:
    """Collectives of a step on one device: what, axis, phase, how often, bytes."""
    return [
        [item.collective, item.axis, item.phase, f"{item.count:,}", format_bytes(item.num_bytes)]
        for item in sorted(plan.collectives, key=lambda item: -item.num_bytes)
    ]


def runner_up_rows(plan: Plan) -> list[list[str]]:
    """Other plans that were solved: seconds, by how much they lose, memory."""
    costs = plan.step.costs
    return [
        [
            other.what,
            format_seconds(other.simulated),
            f"{other.simulated / costs.simulated - 1.0:+.2%}",
            f"{other.seconds / costs.seconds - 1.0:+.2%}",
            format_bytes(other.memory),
        ]
        for other in plan.step.alternatives
    ]


def assumption_rows(plan: Plan) -> list[list[str]]:
    """Every input of the cost model: name, value, where it comes from, what it prices."""
    try:
        cluster = Cluster.from_dict(dict(plan.cluster))
    except ValueError:
        return [["prices", "not a cluster's", "passed by the caller", "everything"]]
    return list(_rows(cluster))


def _rows(cluster: Cluster) -> Iterator[list[str]]:
    device, where = cluster.device, f"cluster {cluster.name!r}, as the plan keeps it"
    for dtype, rate in device.flops.items():
        yield [f"peak, {dtype}", f"{rate / 1e12:,.4g} TFLOP/s", where, "matrix products and attention"]
    yield ["memory bandwidth", f"{device.memory_bandwidth / 1e9:,.4g} GB/s", where, "elementwise, norms, optimizer"]
    yield ["memory", format_bytes(device.memory_bytes), where, "what fits"]
    yield ["memory kept by the driver", format_bytes(device.reserved_bytes), where, "what fits"]
    yield ["shortest operator", format_seconds(device.launch_overhead), where, "small operators"]
    yield ["slowdown beside communication", f"{device.overlap_slowdown:.0%}", where, "compute beside gathers"]
    if not device.efficiency:
        yield ["efficiency", "100%", "none given: every operator runs at its peak", "every operator"]
    for kind, efficiency in device.efficiency.items():
        points = [*efficiency.flops.points, *efficiency.bytes.points]
        shares = [share for _, share in points]
        value = f"{min(shares):.0%} to {max(shares):.0%} of the peak by size" if shares else "the peak"
        yield [f"efficiency, {kind}", value, where, f"{kind} operators"]
    for level in cluster.levels:
        yield [f"{level.name}: bandwidth", f"{level.bandwidth / 1e9:,.4g} GB/s", where, "collectives over it"]
        yield [f"{level.name}: latency", format_seconds(level.latency), where, "short collectives over it"]
