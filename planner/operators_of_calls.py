"""Plans for operators of calls that the plan of a step does not contain: they are split over the ranks of one stage."""

from __future__ import annotations

import dataclasses

from cost_models import Cluster, CostModel
from passes.ir.graph import Graph
from passes.pipeline_cut import BATCH_AXIS
from passes.plan import Plan
from passes.plan.plan_data import NodePlan
from passes.rules import rule_for
from planner.planning import plan_graph
from planner.sharding_ilp import search
from planner.sharding_ilp.constraints import planned_strategies
from planner.whole_step.costs.batch_propagation import follow_batch
from runtime.execution.rank_mapping import Places
from runtime.execution.replanning import Planner

#: A label that no strategy has: any will do on this axis.
_ANY = ""


def within_a_stage(plan: Plan, places: Places) -> Planner:
    """A planner for operators that ``plan`` does not contain.

    The batch axis of the plan that it is handed may be longer than that of ``plan``: it counts micro-batches too.
    """

    def find_plan(graph: Graph, pinned: Plan | None) -> Plan:
        if pinned is not None and pinned.nodes:
            pinned = _following_samples(graph, pinned)
        cluster = Cluster.from_dict(plan.cluster).subset(plan.mesh.num_devices)
        with places.layout.plain():
            if pinned is None or pinned.mesh == plan.mesh:
                return plan_graph(graph, cluster, mesh=plan.mesh, pinned=pinned)
            prices = _PiecePrices(CostModel(cluster, plan.mesh.as_dict()))
            return search(graph, mesh=pinned.mesh, cost_model=prices, cluster_info=cluster.to_dict(), pinned=pinned)

    return find_plan


def _following_samples(graph: Graph, pinned: Plan) -> Plan:
    """``pinned``; operators of whose kind ``graph`` has more or fewer than it follow the batch on its axis instead.

    Operators are numbered by module and kind. With one more (a number of Python's that was 1 and is 2), the strategies
    of those behind it are their neighbours'.
    """
    strategies = planned_strategies(pinned)
    keys = {node.key for node in graph.nodes if not node.constant}
    other_kinds = {_kind(key) for key in keys.symmetric_difference(strategies)}
    place = pinned.mesh.names.index(BATCH_AXIS)
    labels = follow_batch(graph, rules=rule_for).labels if other_kinds.intersection(map(_kind, keys)) else {}
    nodes = dict(pinned.nodes)
    for node in graph.nodes:
        if node.name in labels and _kind(node.key) in other_kinds:
            strategy = [*strategies.get(node.key, [_ANY] * len(pinned.mesh.names))]
            strategy[place] = labels[node.name]
            nodes[node.key] = NodePlan(node.op, tuple(strategy), ())
    return dataclasses.replace(pinned, nodes=nodes)


def _kind(key: str) -> str:
    """The module and the operator of a node, without its number among those."""
    return key.rpartition(":")[0]


class _PiecePrices:
    """Prices on a mesh whose batch axis has a part for each micro-batch of each rank.

    Micro-batches exchange nothing. What an operator would exchange between them is priced as traffic of memory, so that
    where there is a choice samples stay where they are.
    """

    def __init__(self, cost_model: CostModel) -> None:
        self.cost_model = cost_model

    def compute_seconds(self, *, flops: float, num_bytes: float, dtype: str, kind: str | None = None) -> float:
        return self.cost_model.compute_seconds(flops=flops, num_bytes=num_bytes, dtype=dtype, kind=kind)

    def collective_seconds(self, collective: str, *, num_bytes: float, axis: str) -> float:
        if axis == BATCH_AXIS:
            return self.compute_seconds(flops=0.0, num_bytes=num_bytes, dtype="float32", kind="copy")
        return self.cost_model.collective_seconds(collective, num_bytes=num_bytes, axis=axis)
