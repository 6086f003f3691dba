"""Plans leave memory to the allocator, and of plans that are equally fast the one in less memory is taken."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

import planner
from cost_models import Cluster
from cost_models.memory import HEADROOM, reserved_bytes
from planner.pipeline_ilp.stage_problem import StageProblem
from planner.pipeline_ilp.stage_search import StageSolution
from planner.planning import capture_for_planning
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.costs.level_one import LevelOne
from planner.whole_step.costs.sharding import ShardingSpace
from planner.whole_step.costs.unit_costs import StepUnits
from planner.whole_step.plan_step import plan_step
from planner.whole_step.result.lighter import FastEnough, fullest
from planner.whole_step.result.plan_of_solution import judge

pytestmark = pytest.mark.usefixtures("models_traced_once")

CONFIG = LlamaConfig(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16, vocab_size=8192
)


def test_of_plans_that_are_equally_fast_the_lighter_is_taken() -> None:
    graph, cluster = capture_for_planning(CONFIG, batch_size=64, seq_len=512), Cluster.parse("dgx-v100-32g:1x4")
    space = ShardingSpace.of(graph)
    search = Search(LevelOne(cluster, space, StepUnits.of(space)), cluster, read_demands({"tp": 2}))
    first = judge(search.run().solutions[0])
    step = plan_step(graph, cluster, read_demands({"tp": 2})).step
    assert step is not None
    assert max(rank.total for rank in step.memory) <= 0.95 * fullest(first)
    assert step.costs.simulated <= first.report.seconds * (1 + search.demands.gap)


def test_what_did_not_do_in_more_memory_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the shardings that are tried two are the same to the stages, and none is fast enough in less memory."""
    unsolved: list[tuple[StageProblem, float]] = []
    stages = FastEnough._stages

    def recorded(self: FastEnough, problem: StageProblem, memory: float) -> StageSolution | None:
        assert not any(problem == other and memory <= most for other, most in unsolved)
        solution = stages(self, problem, memory)
        if solution is None:
            unsolved.append((problem, memory))
        return solution

    monkeypatch.setattr(FastEnough, "_stages", recorded)
    plan = planner.plan(CONFIG, "dgx-v100-32g:1x4", batch_size=64, seq_len=512, fix={"tp": 2, "pp": 2})
    assert unsolved and plan.certificate.gap <= 0.01


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_what_a_memory_bound_plan_reserves_fits(share: float) -> None:
    options = {"batch_size": 64, "seq_len": 512, "fix": {"dp": 4}}
    roomy = planner.plan(CONFIG, "dgx-h100:1x4", **options)
    assert roomy.step is not None
    limit = share * max(rank.total for rank in roomy.step.memory)
    tight = planner.plan(CONFIG, "dgx-h100:1x4", **options, memory_limit=limit)
    assert tight.step is not None and tight.step.headroom == HEADROOM
    assert reserved_bytes(max(rank.total for rank in tight.step.memory)) <= limit
    assert "beside 6.0% for the allocator, communicators, CUDA graphs" in tight.summary()


def test_devices_without_curves_are_named() -> None:
    plan = planner.plan(CONFIG, "cpu-local:2", batch_size=2, seq_len=8)
    assert any("no efficiency curves" in note and "utilisation" in note for note in plan.notes)


@pytest.mark.parametrize(("bandwidth", "computes_the_same"), [(1e3, True), (1e12, False)])
def test_ranks_that_compute_the_same_are_named(bandwidth: float, computes_the_same: bool) -> None:
    """Over a link that is slow enough, what cutting saves takes longer to send: each rank does all the work."""
    cluster = Cluster.uniform(2, flops=1e9, memory_bandwidth=1e9, latency=0.0, bandwidth=bandwidth, memory_bytes=2**34)
    plan = planner.plan(CONFIG, cluster, batch_size=2, seq_len=8, fix={"tp": 2})
    note = "no operator is cut on tp: its 2 ranks compute the same, in the time that one of them takes"
    assert (note in plan.notes) == computes_the_same
    assert any(entry.axis == "tp" for entry in plan.collectives) != computes_the_same
