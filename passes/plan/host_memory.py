"""What a step keeps in the memory of its hosts, node by node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cost_models import Cluster
from passes.plan.step_plan import ON_HOST, RankMemory, StepPlan
from passes.plan.text_tables import format_bytes


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


#: What is in the hosts' memory, if it is.
_THERE: Mapping[str, Callable[[StepPlan], bool]] = {
    "optimizer state": lambda step: step.optimizer_on_host,
    "activations": lambda step: ON_HOST in step.recompute,
}


def on_hosts(step: StepPlan) -> list[str]:
    """What the step keeps in the hosts' memory, as text."""
    return [name for name, there in _THERE.items() if there(step)]


def host_lines(cluster: Mapping[str, Any], step: StepPlan) -> list[str]:
    """What a summary says of the hosts: nothing where nothing is offloaded."""
    what = on_hosts(step)
    if not what:
        return []
    read = Cluster.from_dict(dict(cluster))
    if read.host is None:
        return []
    nodes = host_bytes_by_node(step.axes, step.memory, read.host.num_devices(read.levels))
    return [
        f"{' and '.join(what)} in the hosts' memory: {format_bytes(sum(nodes))}, {format_bytes(max(nodes))} on the "
        f"fullest of {len(nodes)}, which has {format_bytes(read.host.memory_bytes)}"
    ]
