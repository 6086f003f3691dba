"""The clock only stops a search: how fast or how busy the machine is decides nothing else."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import pytest
from transformers import LlamaConfig

from cost_models import Cluster
from passes.capture import capture
from passes.ir.graph import Graph
from passes.ir.types import MeshShape
from passes.plan import Plan
from planner.pipeline_ilp.stage_ilp import solve_stages
from planner.planning import capture_for_planning, plan_graph
from planner.solvers.linear import EFFORT_LIMIT, SECOND, TIME_LIMIT
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.plan_step import plan_step
from tests.expert_models import mixture, mixture_batch
from tests.test_step_stages_large import GIB, uniform

#: A V schedule of uneven stages.
UNEVEN = {"pp": 2, "dp": 4, "schedule": "zbv"}


@functools.cache
def graph() -> Graph:
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=7, num_attention_heads=8, vocab_size=4096
    )
    return capture_for_planning(config, batch_size=16, seq_len=512)


def plan(*, time_limit: float | None) -> Plan:
    return plan_step(graph(), Cluster.parse("dgx-h100:1"), read_demands(UNEVEN, time_limit=time_limit))


def run_clocks(monkeypatch: pytest.MonkeyPatch, *, times: float) -> None:
    """Let every clock of Python run so many times as fast."""

    def faster(clock: Callable[[], float]) -> Callable[[], float]:
        began = clock()
        return lambda: began + times * (clock() - began)

    for name in ("monotonic", "perf_counter", "process_time", "time"):
        monkeypatch.setattr(time, name, faster(getattr(time, name)))


def test_a_stage_program_is_given_up_after_the_same_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = uniform(num_layers=126, num_ranks=16, memory=60 * GIB, schedule="interleaved_1f1b", chunks_per_rank=8)
    quiet = solve_stages(problem, gap=1e-4, effort=SECOND / 2)
    assert quiet is not None and quiet.status == EFFORT_LIMIT
    run_clocks(monkeypatch, times=100.0)
    assert solve_stages(problem, gap=1e-4, effort=SECOND / 2, deadline=time.monotonic() + 1e6) == quiet


def test_a_machine_that_is_twenty_times_slower_gets_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = plan(time_limit=1e6)
    run_clocks(monkeypatch, times=20.0)
    assert plan(time_limit=1e6) == quiet


def test_a_search_with_experts_ends_after_so_many_programs_however_slow_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experts = capture(mixture(num_experts=8, layers=2), kwargs=mixture_batch(batch=64, length=8))
    monkeypatch.setattr("planner.whole_step.candidates.demands.EXPERT_PROGRAMS", 2.0)
    quiet = plan_step(experts, Cluster.parse("dgx-h100:1"), read_demands(time_limit=1e6))
    assert quiet.certificate.status.startswith(EFFORT_LIMIT)
    run_clocks(monkeypatch, times=20.0)
    assert plan_step(experts, Cluster.parse("dgx-h100:1"), read_demands(time_limit=1e6)) == quiet


def test_a_search_without_experts_ends_after_so_many_programs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user gives it seconds."""
    monkeypatch.setattr("planner.whole_step.candidates.demands.PROGRAMS", 2.0)
    quiet = plan(time_limit=None)
    assert quiet.certificate.status.startswith(EFFORT_LIMIT)
    run_clocks(monkeypatch, times=20.0)
    assert plan(time_limit=None) == quiet
    assert not plan(time_limit=1e6).certificate.status.startswith(EFFORT_LIMIT)


def test_a_search_on_a_mesh_ends_after_the_same_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_mesh() -> Plan:
        return plan_graph(graph(), Cluster.parse("dgx-h100:1"), mesh=MeshShape.parse("dp=2,tp=4"))

    whole = on_mesh()
    monkeypatch.setattr("planner.solvers.limits.DEFAULT_EFFORT", SECOND / 1000)
    monkeypatch.setattr("planner.solvers.limits.DEFAULT_ITERATIONS", 20)
    quiet = on_mesh()
    assert whole.certificate.status != EFFORT_LIMIT and quiet.certificate.status == EFFORT_LIMIT
    run_clocks(monkeypatch, times=20.0)
    assert on_mesh() == quiet


def test_a_search_that_time_stops_says_so() -> None:
    stopped = plan(time_limit=0.0)
    assert stopped.certificate.status.startswith(TIME_LIMIT) and TIME_LIMIT == "stopped by time limit"
    assert stopped.certificate.gap > 0.01
