"""What a step keeps in the memory of its hosts, node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cost_models import Cluster
from passes.plan.step_plan import RankMemory, StepPlan
from passes.plan.text_tables import format_bytes

#: ``StepPlan.offload`` of a step whose optimizer runs on the hosts, with its state in their memory.
OPTIMIZER = "optimizer"


def host_bytes_by_node(axes: Mapping[str, int], memory: Sequence[RankMemory], node_size: int) -> list[float]:
    """Bytes in the host's memory of every node.

    Args:
        axes: of the mesh, outermost first, over devices in rank order.
        memory: of each pipeline rank.
        node_size: devices of one node.
    """
    stride, stages, total = 1, 1, 1
    for axis, size in reversed(tuple(axes.items())):
        if axis == "pp":
            stride, stages = total, size
        total *= size
    nodes = [0.0] * -(-total // node_size)
    for device in range(total):
        nodes[device // node_size] += memory[device // stride % stages].host
    return nodes


def host_lines(cluster: Mapping[str, Any], step: StepPlan) -> list[str]:
    """What a summary says of the hosts: nothing where nothing is offloaded."""
    if not step.offload:
        return []
    read = Cluster.from_dict(dict(cluster))
    if read.host is None:
        return []
    nodes = host_bytes_by_node(step.axes, step.memory, read.host.num_devices(read.levels))
    return [
        f"optimizer state in the hosts' memory: {format_bytes(sum(nodes))}, {format_bytes(max(nodes))} on the fullest "
        f"of {len(nodes)}, which has {format_bytes(read.host.memory_bytes)}"
    ]
