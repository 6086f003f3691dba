"""``planner cluster show``: what a cluster file or preset says, and what bandwidth groups of its devices get."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

from planner.cli.shared_options import MESH_HELP, subparser

_EXAMPLES = (
    "planner cluster show dgx-h100:32",
    "planner cluster show examples/clusters/fat-tree.toml --mesh dp=32,tp=8",
    "planner cluster show tpu-v4-torus:8x8x8",
)


def add_cluster(commands: Any) -> None:
    """Add the subcommand."""
    parser = subparser(
        commands, "cluster", help="show a cluster: devices, links, and the bandwidth of groups", examples=_EXAMPLES
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    show = subparser(
        actions, "show", help="print devices, link levels, bisection and the bandwidth of groups", examples=_EXAMPLES
    )
    show.add_argument("cluster", help="PRESET[:NODES] or a TOML file")
    show.add_argument("--mesh", metavar="AXIS=SIZE,…", help=f"{MESH_HELP} (default: an axis along each level)")
    show.set_defaults(command=_show)


def _show(options: argparse.Namespace) -> int:
    from cost_models import Cluster
    from cost_models.text import printable_lines
    from planner.planning import as_mesh_shape

    cluster = Cluster.parse(options.cluster)
    axes = as_mesh_shape(options.mesh).as_dict() if options.mesh is not None else _along_levels(cluster)
    print(printable_lines("\n\n".join(_sections(cluster, axes))))
    return 0


def _along_levels(cluster: Any) -> dict[str, int]:
    """An axis for each level, of its name: what every level joins."""
    from cost_models.cluster_graph import num_parts

    sizes = {level.name: num_parts(cluster.levels, index) for index, level in enumerate(cluster.levels)}
    return dict(reversed(sizes.items()))


def _sections(cluster: Any, axes: dict[str, int]) -> Iterator[str]:
    from cost_models.bisection import bisection_bandwidth
    from passes.plan.text_tables import format_bytes, format_table

    devices = ", ".join(
        f"{group.count:,} × {group.device.name} ({format_bytes(group.device.memory_bytes)})" for group in cluster.groups
    )
    yield f"{cluster.name}: {devices}; bisection {_rate(bisection_bandwidth(cluster.levels))}"
    yield format_table(
        "Levels of links, innermost first",
        ("level", "joins", "wiring", "a link", "latency", "shared by"),
        list(_levels(cluster)),
    )
    yield format_table(
        "GB/s that each member of a group sends while all groups work, outermost first",
        ("axis", "size", "level", "ring", "tree", "all-to-all", "to the next", "latency"),
        list(_groups(cluster, axes)),
    )


def _levels(cluster: Any) -> Iterator[tuple[str, ...]]:
    from cost_models.cluster_graph import num_parts, sharers
    from cost_models.text import counted

    for index, level in enumerate(cluster.levels):
        parts = num_parts(cluster.levels, index)
        joins = f"{parts:,} {cluster.levels[index - 1].name}" if index else counted(parts, "device")
        latency, bandwidth = level.slowest_link(cluster.num_devices)
        slowest = "at least " * bool(level.exceptions or level.wires)
        yield (
            level.name, joins, level.wiring, f"{slowest}{_rate(bandwidth)}", _latency(latency),
            str(sharers(cluster.levels, index)),
        )  # fmt: skip


def _groups(cluster: Any, axes: dict[str, int]) -> Iterator[tuple[str, ...]]:
    from cost_models import CostModel

    model = CostModel(cluster, axes)
    for axis, size in axes.items():
        names = [level.name for level in model.levels(axis)]
        spans = model.spans(axis)
        if len(spans) < len(names):  # a group that levels cut unevenly meets at the outermost
            names = names[-1:]
        for name, span in zip(names, spans):
            share = span.bandwidth
            rates = (share.ring, share.tree, share.exchange, share.message)
            yield axis, str(size), name, *(_number(rate) for rate in rates), _latency(span.latency)


def _rate(bandwidth: float) -> str:
    return _number(bandwidth) if math.isinf(bandwidth) else f"{_number(bandwidth)} GB/s"


def _number(bandwidth: float) -> str:
    """In GB/s."""
    return "unlimited" if math.isinf(bandwidth) else f"{bandwidth / 1e9:,.4g}"


def _latency(seconds: float) -> str:
    from passes.plan.text_tables import format_seconds

    return format_seconds(seconds)
