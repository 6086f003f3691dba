"""The cluster with the mesh laid on it, and the load of each link level."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cost_models import Cluster, CostModel
from cost_models.cluster_graph import num_parts
from cost_models.collectives import ALGORITHMS
from cost_models.text import counted
from passes.plan import CollectivePlan, Plan
from passes.plan.plan_data import OVER_PIECES, OVER_REPLICAS
from passes.plan.text_tables import format_bytes, format_seconds
from planner.inspection.html_report.report_section import COLOURS, ReportSection, plain_figure

#: Squares that are drawn; more would be dots.
MAX_SQUARES = 512
#: Squares in a row where one stands for several devices.
ROW = 32
#: The axis of a group in the mesh that it is priced on.
GROUP = "group"
HEADER = ("axis", "size", "stride", "runs on", "a device sends a step", "busy for", "of the step")


def cluster_section(plan: Plan) -> ReportSection:
    """An axis a row with its links and what a device sends over it in a step, and a picture of the devices."""
    try:
        cluster = Cluster.from_dict(dict(plan.cluster))
    except ValueError:
        return ReportSection("The plan was made for prices that are not a cluster's.", HEADER, ())
    step, rows = plan.step, []
    stages = step.axes.get("pp", 1)  # collectives are listed of a device of every stage together
    for group in groups_of(plan):
        model = group.cost_model(cluster)
        own = [item for item in plan.collectives if item.axis == group.name and item.count]
        links = " + ".join(f"{level.name} ({level.bandwidth / 1e9:g} GB/s)" for level in model.levels(GROUP))
        sent, busy = sum(item.num_bytes for item in own) / stages, sum(_seconds(item, model) for item in own) / stages
        share = f"{busy / step.costs.simulated:.1%}" if step.costs.simulated else ""
        sizes = [group.name, str(group.size), str(group.stride), links]
        rows.append([*sizes, format_bytes(sent), format_seconds(busy), share])
    device = cluster.device
    levels = ", ".join(f"{level.name} {level.bandwidth / 1e9:g} GB/s" for level in cluster.levels)
    drawn, picture = _picture(cluster, step.axes)
    summary = f"{step.num_devices:,} × {device.name} of {cluster.name}; links: {levels or 'none'}. {drawn}"
    return ReportSection(summary, HEADER, rows, picture)


@dataclass(frozen=True)
class AxisGroup:
    """Ranks that meet in collectives: those of a mesh axis, of several side by side, or some of the data ranks."""

    name: str
    size: int
    stride: int

    def cost_model(self, cluster: Cluster) -> CostModel:
        """Prices of a mesh that has these groups along ``GROUP``."""
        outer = cluster.num_devices // (self.stride * self.size)
        return CostModel(cluster, {"outer": outer, GROUP: self.size, "inner": self.stride})


def groups_of(plan: Plan) -> Iterator[AxisGroup]:
    """Every axis of more than one rank, and whatever else the plan's collectives are over, by their names."""
    step = plan.step
    sizes = {axis: size for axis, size in step.axes.items() if size > 1}
    names = dict.fromkeys([*sizes, *(item.axis for item in plan.collectives)])
    for name in names:
        base = name.removesuffix(OVER_PIECES).removesuffix(OVER_REPLICAS)
        group = _side_by_side(base, sizes)
        if group is None:
            continue
        if name == f"{base}{OVER_PIECES}":
            yield AxisGroup(name, step.zero_ranks, group.stride)
        elif name == f"{base}{OVER_REPLICAS}":
            yield AxisGroup(name, group.size // step.zero_ranks, group.stride * step.zero_ranks)
        else:
            yield group


def _side_by_side(name: str, sizes: Mapping[str, int]) -> AxisGroup | None:
    """The group of axes side by side whose names, with ``_`` between them, are ``name``; None if there is none."""
    axes = list(sizes)
    for first, end in itertools.combinations(range(len(axes) + 1), 2):
        if "_".join(axes[first:end]) == name:
            size, stride = (math.prod(sizes[axis] for axis in some) for some in (axes[first:end], axes[end:]))
            return AxisGroup(name, size, stride)
    return None


def _seconds(item: CollectivePlan, model: CostModel) -> float:
    """Seconds that the group's links are busy for in a step, if nothing shares them: the collective's own price."""
    each = item.num_bytes / item.count
    if item.collective in ALGORITHMS:
        return item.count * model.collective_seconds(item.collective, num_bytes=each, axis=GROUP)
    return item.count * model.p2p_seconds(num_bytes=each, axis=GROUP)  # sends, and broadcasts of a few numbers


def _picture(cluster: Cluster, axes: Mapping[str, int]) -> tuple[str, Any]:
    """Devices as squares, a node (the innermost level) a row, and what is drawn in words; colours tell pipeline ranks
    apart, whose number stands where one begins.

    Of more devices than there is room for, a square stands for neighbours of one pipeline rank.
    """
    from bokeh.models import ColumnDataSource, HoverTool

    total = cluster.num_devices
    together = devices_together(total, axes)
    width = ROW if together > 1 else num_parts(cluster.levels, 0) if cluster.levels else total
    shown = range(min(total // together, MAX_SQUARES))
    places = [_coordinates(square * together, axes) for square in shown]
    palette = list(COLOURS.values())
    stages = [int(place.get("pp", 0)) for place in places]
    ends = [f" to {(square + 1) * together - 1}" if together > 1 else "" for square in shown]
    source = ColumnDataSource(
        {
            "x": [square % width + 0.5 for square in shown],
            "y": [square // width + 0.5 for square in shown],
            "rank": [f"{square * together}{end}" for square, end in zip(shown, ends)],
            "place": [", ".join(f"{axis} {index}" for axis, index in place.items()) for place in places],
            "colour": [palette[stage % len(palette)] for stage in stages],
            "stage": [
                str(stage) if not square % width or stage != stages[square - 1] else ""
                for square, stage in zip(shown, stages)
            ],
        }
    )
    rows = -(-len(shown) // width)
    if together > 1:
        drawn, axis_labels = f"{counted(together, 'device')} a square, {ROW} squares a row", ("", "")
    else:
        part = "The first" if total > len(shown) else "All" if total > 1 else "The"
        number = f"{len(shown)} of {total:,} devices" if total > len(shown) else counted(total, "device")
        drawn = f"{part} {number}"
        drawn, axis_labels = f"{drawn}, a node a row", ("device of a node", "node")
    chart = plain_figure(
        height=max(140, min(620, 22 * rows + 80)), y_range=(rows, 0), x_range=(0, width), tools="save",
        x_axis_label=axis_labels[0], y_axis_label=axis_labels[1],
    )  # fmt: skip
    if together > 1:
        chart.axis.ticker = []
    else:  # nodes and devices have whole numbers, in the middle of their squares
        for axis, count in ((chart.xaxis, min(width, len(shown))), (chart.yaxis, rows)):
            marks = range(0, count, -(-count // 8))
            axis.ticker = [mark + 0.5 for mark in marks]
            axis.major_label_overrides = {mark + 0.5: str(mark) for mark in marks}
    chart.rect("x", "y", 0.92, 0.86, source=source, fill_color="colour", line_color=None)
    chart.text("x", "y", "stage", source=source, text_align="center", text_baseline="middle", text_font_size="10px")
    chart.add_tools(HoverTool(tooltips=[("device", "@rank"), ("mesh", "@place")]))
    return f"{drawn}; colour and number: pipeline rank.", chart


def devices_together(total: int, axes: Mapping[str, int]) -> int:
    """How many neighbours one square stands for: as few as there is room for, all of one pipeline rank; else 1."""
    stride, after = total, total
    for axis, size in axes.items():
        after //= size
        if axis == "pp":
            stride = after
    counts = (count for count in range(-(-total // MAX_SQUARES), stride + 1) if stride % count == 0)
    return next(counts, 1)


def _coordinates(rank: int, axes: Mapping[str, int]) -> dict[str, int]:
    """Where a device is on the mesh, whose axes are laid row by row over the ranks."""
    place = {}
    for axis, size in reversed([*axes.items()]):
        if size > 1:
            place[axis] = rank % size
        rank //= size
    return dict(reversed([*place.items()]))
