"""What the prices of a plan rest on: every input of the cost model, where it comes from, and what it prices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cost_models import Cluster
from cost_models.presets import preset_names
from cost_models.presets.figure_sources import figure_sources
from passes.plan import Plan
from passes.plan.text_tables import format_bytes, format_seconds

#: Kind of operator → the topic of a preset's sources that its efficiency is of; all others are bound by memory.
_KIND_TOPICS: Mapping[str, str] = {
    "matmul": "Matmul",
    "attention": "Attention",
    "attention_backward": "Attention",
    **dict.fromkeys(("masked_attention", "masked_attention_backward"), "Attention"),
    **dict.fromkeys(("biased_attention", "biased_attention_backward"), "Attention"),
}
_MEMORY_BOUND = "Memory-bound work"


def assumption_rows(plan: Plan) -> list[list[str]]:
    """Every input of the cost model: name, value, where it comes from, what it prices."""
    try:
        cluster = Cluster.from_dict(dict(plan.cluster))
    except ValueError:
        return [["prices", "not a cluster's", "passed by the caller", "everything"]]
    return list(_rows(cluster, _Sources(cluster)))


class _Sources:
    """Where a cluster's figures come from: what its preset says, as long as they are the preset's."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        name = cluster.name.partition("[")[0].partition(":")[0]
        self.preset = Cluster.parse(name) if name in preset_names() else None
        self.sources = figure_sources(name)
        self.where = f"cluster {cluster.name!r}, as the plan keeps it"
        if cluster.profile is not None:
            self.where = f"measured by planner profile: {cluster.profile.machine}"

    def of_device(self, topic: str) -> str:
        """The source of a figure of the device."""
        if self.preset is None:
            return self.where
        if self.cluster.device != self.preset.device:
            return f"{self.where} (not as the preset of that name has it)"
        return self.sources.get(topic, f"preset {self.preset.name!r}, which names no source")

    def of_links(self, index: int, *topics: str) -> str:
        """The source of a figure of a level of links: the first of ``topics`` that the preset has one for."""
        if self.preset is None:
            return self.where
        level, levels = self.cluster.levels[index], {level.name: level for level in self.preset.levels}
        same = levels.get(level.name)
        if same is None or (same.bandwidth, same.latency) != (level.bandwidth, level.latency):
            return f"{self.where} (not as the preset of that name has it)"
        texts = [self.sources[topic] for topic in topics if topic in self.sources]
        return texts[0] if texts else f"preset {self.preset.name!r}, which names no source"


def _rows(cluster: Cluster, sources: _Sources) -> Iterator[list[str]]:
    device, of_device = cluster.device, sources.of_device
    for dtype, rate in device.flops.items():
        prices = "matrix products and attention"
        yield [f"peak, {dtype}", f"{rate / 1e12:,.4g} TFLOP/s", of_device("Device"), prices]
    bandwidth = f"{device.memory_bandwidth / 1e9:,.4g} GB/s"
    yield ["memory bandwidth", bandwidth, of_device("Device"), "elementwise, norms, optimizer"]
    yield ["memory", format_bytes(device.memory_bytes), of_device("Memory"), "what fits"]
    yield ["memory kept by the driver", format_bytes(device.reserved_bytes), of_device("Memory"), "what fits"]
    yield ["shortest operator", format_seconds(device.launch_overhead), of_device("Launch"), "small operators"]
    if device.host_seconds:
        host = format_seconds(device.host_seconds)
        yield ["host, to launch an operator", host, of_device("Host"), "units of many small operators"]
    slowdown = f"{device.overlap_slowdown:.0%}"
    yield ["slowdown beside communication", slowdown, of_device("Overlap"), "compute beside gathers"]
    if not device.efficiency:
        yield ["efficiency", "100%", "none given: every operator runs at its peak", "every operator"]
    for kind, efficiency in device.efficiency.items():
        points = [*efficiency.flops.points, *efficiency.bytes.points]
        shares = [share for _, share in points]
        value = f"{min(shares):.0%} to {max(shares):.0%} of the peak by size" if shares else "the peak"
        yield [f"efficiency, {kind}", value, of_device(_KIND_TOPICS.get(kind, _MEMORY_BOUND)), f"{kind} operators"]
    for index, level in enumerate(cluster.levels):
        topics = (f"bandwidth of {level.name}", "Links", "Device")
        speed = f"{level.bandwidth / 1e9:,.4g} GB/s"
        yield [f"{level.name}: bandwidth", speed, sources.of_links(index, *topics), "collectives over it"]
        latency = format_seconds(level.latency)
        source = sources.of_links(index, "Latency", "Protocols", "Links")
        yield [f"{level.name}: latency", latency, source, "short collectives over it"]
    for name, measured in cluster.profile.ranges.items() if cluster.profile is not None else ():
        off = f"{measured.median:.2f} ({measured.low:.2f} to {measured.high:.2f})"
        sizes = (
            f"{measured.calls} calls that were not fitted, {measured.least:.3g} to {measured.most:.3g} {measured.unit}"
        )
        yield [f"measured over predicted, {name}", off, sizes, name]
