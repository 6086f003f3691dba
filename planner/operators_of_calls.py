"""Plans for operators of calls that the plan of a step does not contain: they are split over the ranks of one stage."""

from __future__ import annotations

from cost_models import Cluster, CostModel
from passes.ir.graph import Graph
from passes.pipeline_cut import BATCH_AXIS
from passes.plan import Plan
from planner.planning import plan_graph
from planner.sharding_ilp import search
from runtime.execution.rank_mapping import Places
from runtime.execution.replanning import Planner


def within_a_stage(plan: Plan, places: Places) -> Planner:
    """A planner for operators that ``plan`` does not contain.

    The batch axis of the plan that it is handed may be longer than that of ``plan``: it counts micro-batches too.
    """

    def find_plan(graph: Graph, pinned: Plan | None) -> Plan:
        cluster = Cluster.from_dict(plan.cluster).subset(plan.mesh.num_devices)
        with places.layout.plain():
            if pinned is None or pinned.mesh == plan.mesh:
                return plan_graph(graph, cluster, mesh=plan.mesh, pinned=pinned)
            prices = _PiecePrices(CostModel(cluster, plan.mesh.as_dict()))
            return search(graph, mesh=pinned.mesh, cost_model=prices, cluster_info=cluster.to_dict(), pinned=pinned)

    return find_plan


class _PiecePrices:
    """Prices on a mesh whose batch axis has a part for each micro-batch of each rank.

    Micro-batches exchange nothing. What an operator would exchange between them is priced as traffic of memory, so that
    where there is a choice samples stay where they are.
    """

    def __init__(self, cost_model: CostModel) -> None:
        self.cost_model = cost_model

    def compute_seconds(self, *, flops: float, num_bytes: float, dtype: str) -> float:
        return self.cost_model.compute_seconds(flops=flops, num_bytes=num_bytes, dtype=dtype)

    def collective_seconds(self, collective: str, *, num_bytes: float, axis: str) -> float:
        if axis == BATCH_AXIS:
            return num_bytes / self.cost_model.device.memory_bandwidth
        return self.cost_model.collective_seconds(collective, num_bytes=num_bytes, axis=axis)
