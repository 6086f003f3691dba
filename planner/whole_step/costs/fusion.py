"""What compiled code keeps in registers: a graph-level estimate of ``torch.compile``'s fusion.

Cheap operators (elementwise, norms, reductions, copies) that feed one another become one kernel: a value that only
cheap operators use is never written, and a cheap operator does not read from memory what another has just made.
"""

from __future__ import annotations

from collections import defaultdict

from passes.ir.graph import Graph, Node
from passes.rules.kinds import COPY, ELEMENTWISE, NORM, REDUCTION, kind_of
from planner.sharding_ilp.sharding_prices import is_view
from planner.whole_step.costs.operator_facts import Fusion

#: Kinds that a compiler joins with their neighbours.
FUSIBLE = frozenset((ELEMENTWISE, NORM, REDUCTION, COPY))


def _is_opaque(node: Node) -> bool:
    """Whether a compiler calls the operator as it is: fused operators are kernels of their own."""
    return node.op.startswith("meshwright.") and node.op.endswith(".default")


def fuse(graph: Graph) -> Fusion:
    """Reads and writes that compiled code saves; views are looked through."""
    source: dict[str, str] = {}
    cheap_made: set[str] = set()
    users: dict[str, list[bool]] = defaultdict(list)
    reads: set[tuple[str, str]] = set()
    for node in graph.nodes:
        if node.constant:
            continue
        if is_view(node):
            source.update((value.name, source.get(node.inputs[0], node.inputs[0])) for value in node.outputs)
            continue
        cheap = kind_of(node) in FUSIBLE and not _is_opaque(node)
        for name in node.inputs:
            producer = source.get(name, name)
            users[producer].append(cheap)
            if cheap and producer in cheap_made:
                reads.add((node.name, name))
        if cheap:
            cheap_made.update(value.name for value in node.outputs)
    for name in graph.outputs.values():
        users[source.get(name, name)].append(False)
    writes = {name for name in cheap_made if users[name] and all(users[name])}
    return Fusion(frozenset(reads), frozenset(writes))
