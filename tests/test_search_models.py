"""On real architectures: no hand-written plan is cheaper, and plans priced from scratch cost what the solver said."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from cost_models import Cluster, CostModel
from passes.capture import capture
from passes.ir.graph import Graph
from passes.ir.types import MeshShape
from passes.plan import Plan
from planner.auditing.graph_walk import price
from planner.library import load_config
from planner.planning import capture_for_planning
from planner.sharding_ilp import search
from planner.sharding_ilp.role_restrictions import BASELINES
from planner.verification.verify_model import slow_devices
from tests.cells import cells
from tests.small_models import Mlp, mlp_batch, seeded, squared_error

pytestmark = pytest.mark.usefixtures("models_traced_once")

MODELS = ["mlp", "tiny-llama", "tiny-gpt2", "tiny-bert", "tiny-t5", "tiny-vit", "tiny-opt", "tiny-bloom"]


#: Launches and latency dominate these small models on real devices; on slow devices with fast links splitting pays.
CASES = {"tp=4": Cluster.parse("cpu-local:4"), "dp=2,tp=2": slow_devices(4)}
#: Of different kinds: what goes in, what is carried on, what the loss is of.
ON_TWO_AXES = cells(["mlp", "tiny-vit"], ["tiny-t5"])


#: Blocks of an encoder and a decoder, of which the first of each is unlike the others anyway.
ONE_BLOCK_EACH = {"num_layers": 1, "num_decoder_layers": 1}


def captured(model: str) -> Graph:
    if model == "mlp":
        return capture(seeded(Mlp), args=mlp_batch(), loss_fn=squared_error)
    config = load_config(model)
    if model == "tiny-t5":
        config.update(ONE_BLOCK_EACH)
    return capture_for_planning(config, batch_size=8, seq_len=32)


def plan_on(graph: Graph, cluster: Cluster, mesh: MeshShape, *, baseline: str | None = None) -> Plan:
    """Plan and check the price from scratch."""
    cost_model = CostModel(cluster, mesh.as_dict())
    plan = search(graph, mesh=mesh, cost_model=cost_model, cluster_info={}, baseline=baseline)
    costs, collectives = price(graph, plan, cost_model)
    assert costs.total == pytest.approx(plan.certificate.objective, rel=1e-6)
    assert costs.total == pytest.approx(plan.costs.total, rel=1e-6)
    assert collectives == plan.collectives
    assert costs.memory == plan.costs.memory
    return plan


@pytest.mark.parametrize("model", MODELS)
def test_no_baseline_is_cheaper(model: str) -> None:
    graph = captured(model)
    for text, cluster in CASES.items():
        mesh = MeshShape.parse(text)
        if len(mesh.names) > 1 and model not in ON_TWO_AXES:
            continue
        best = plan_on(graph, cluster, mesh)
        assert best.certificate.gap < 1e-3  # copies are alike, the bound is of all plans
        for baseline in BASELINES:
            plan = plan_on(graph, cluster, mesh, baseline=baseline)
            assert best.certificate.objective <= plan.certificate.objective * (1 + 1e-9), baseline
