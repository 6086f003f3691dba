"""On real architectures: no hand-written plan is cheaper, and plans priced from scratch cost what the solver said."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from cost_models import Cluster, CostModel
from passes.ir.graph import Graph
from passes.ir.types import MeshShape
from passes.plan import Plan
from planner.planning import capture_for_planning
from planner.search import price, search
from planner.search.baselines import BASELINES

MODELS = ["tiny-llama", "tiny-gpt2", "tiny-bert", "tiny-t5", "tiny-vit", "tiny-opt", "tiny-bloom"]


def plan_on(graph: Graph, mesh: MeshShape, *, baseline: str | None = None) -> Plan:
    """Plan on CPU processes and check the price from scratch."""
    cost_model = CostModel(Cluster.parse(f"cpu-local:{mesh.num_devices}"), mesh.as_dict())
    plan = search(graph, mesh=mesh, cost_model=cost_model, cluster_info={}, baseline=baseline)
    costs, collectives = price(graph, plan, cost_model)
    assert costs.total == pytest.approx(plan.certificate.objective, rel=1e-6)
    assert costs.total == pytest.approx(plan.costs.total, rel=1e-6)
    assert collectives == plan.collectives
    assert costs.memory == plan.costs.memory
    return plan


@pytest.mark.parametrize("model", MODELS)
def test_no_baseline_is_cheaper(model: str) -> None:
    graph = capture_for_planning(model, batch_size=8, seq_len=32)
    for text in ("tp=4", "dp=2,tp=2"):
        mesh = MeshShape.parse(text)
        best = plan_on(graph, mesh)
        assert best.certificate.gap < 1e-6
        for baseline in BASELINES:
            plan = plan_on(graph, mesh, baseline=baseline)
            assert best.certificate.objective <= plan.certificate.objective * (1 + 1e-9), baseline
