"""The cluster with the mesh laid on it, and the load of each link level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cost_models import Cluster, CostModel
from cost_models.cluster_graph import num_parts
from cost_models.collectives import ALGORITHMS
from passes.plan import Plan
from passes.plan.text_tables import format_bytes, format_seconds
from planner.inspection.html_report.report_section import COLOURS, ReportSection, plain_figure

#: Squares that are drawn; more would be dots.
MAX_SQUARES = 512
#: Squares in a row where one stands for several devices.
ROW = 32
HEADER = ("axis", "size", "stride", "runs on", "a device sends a step", "busy for", "of the step")


def cluster_section(plan: Plan) -> ReportSection:
    """An axis a row with its links and what a device sends over it in a step, and a picture of the devices."""
    try:
        cluster = Cluster.from_dict(dict(plan.cluster))
    except ValueError:
        return ReportSection("The plan was made for prices that are not a cluster's.", HEADER, ())
    step = plan.step
    model = CostModel(cluster, step.axes)
    seconds, rows, stride = seconds_by_axis(plan, model), [], step.num_devices
    stages = step.axes.get("pp", 1)  # collectives are listed of a device of every stage together
    for axis, size in step.axes.items():
        stride //= size
        if size == 1:
            continue
        links = " + ".join(f"{level.name} ({level.bandwidth / 1e9:g} GB/s)" for level in model.levels(axis))
        sent = sum(item.num_bytes for item in plan.collectives if item.axis == axis)
        busy = seconds.get(axis, 0.0) / stages
        share = f"{busy / step.costs.simulated:.1%}" if step.costs.simulated else ""
        rows.append([axis, str(size), str(stride), links, format_bytes(sent / stages), format_seconds(busy), share])
    device = cluster.device
    levels = ", ".join(f"{level.name} {level.bandwidth / 1e9:g} GB/s" for level in cluster.levels)
    drawn, picture = _picture(cluster, step.axes)
    summary = f"{step.num_devices:,} × {device.name} of {cluster.name}; links: {levels or 'none'}. {drawn}"
    return ReportSection(summary, HEADER, rows, picture)


def seconds_by_axis(plan: Plan, model: CostModel) -> dict[str, float]:
    """Seconds that each axis's links are busy for in a step, if nothing shares them: the collectives' own prices."""
    seconds: dict[str, float] = {}
    for item in plan.collectives:
        if item.axis in model.axes and item.count and model.axes[item.axis] > 1:
            each = item.num_bytes / item.count
            if item.collective in ALGORITHMS:
                price = model.collective_seconds(item.collective, num_bytes=each, axis=item.axis)
            else:  # sends, and broadcasts of a few numbers
                price = model.p2p_seconds(num_bytes=each, axis=item.axis)
            seconds[item.axis] = seconds.get(item.axis, 0.0) + item.count * price
    return seconds


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
        drawn, axis_labels = f"{together} devices a square, {ROW} squares a row", ("", "")
    else:
        drawn = f"The first {len(shown)} of {total:,} devices" if total > len(shown) else f"All {total:,} devices"
        drawn, axis_labels = f"{drawn}, a node a row", ("device of a node", "node")
    chart = plain_figure(
        height=max(120, min(620, 22 * rows + 80)), y_range=(rows, 0), x_range=(0, width), tools="save",
        x_axis_label=axis_labels[0], y_axis_label=axis_labels[1],
    )  # fmt: skip
    if together > 1:
        chart.axis.ticker = []
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
