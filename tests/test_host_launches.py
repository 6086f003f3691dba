"""Small models are as slow as their host launches them: launches counted by hand, audited, explained, chosen by."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import planner
from cost_models import Cluster
from cost_models.step_time import step_seconds
from passes.ir.graph import Graph
from passes.ir.types import MeshShape
from passes.plan import Plan
from passes.rules import forward_flops
from planner.auditing.repriced_step import reprice
from planner.calibration.call_timing import seconds_to_enqueue
from planner.calibration.measure_machine import _host, _Run
from planner.calibration.operator_cases import launched_chain
from planner.inspection.html_report.assumption_table import assumption_rows
from planner.inspection.objective_ledger import objective_ledger
from planner.inspection.simulated_step import simulated_step
from planner.inspection.time_waterfall import waterfall
from planner.pipeline_ilp.stage_ilp import solve_stages
from planner.pipeline_ilp.stage_problem import as_step
from planner.verification.verify_model import slow_devices
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.costs.level_one import LevelOne
from planner.whole_step.costs.operator_facts import Fusion
from planner.whole_step.costs.step_prices import StepPricing
from planner.whole_step.further_shardings import FurtherShardings
from planner.whole_step.plan_step import plan_step
from tests.exhaustive import fastest, fastest_of_all
from tests.exhaustive_models import MODELS, of_config, of_mixture, of_module, space, two_boxes
from tests.small_models import Mlp, mlp_batch, seeded, squared_error
from tests.test_profile import TRUE, calls_of, fitted
from tests.test_unequal_inspection import CALL, model, two_kinds
from tests.test_unequal_shardings import COLUMNS, NOT_CUT, ROWS, search_with, space_under, with_memory

pytestmark = pytest.mark.usefixtures("models_traced_once")
HOST = "waiting for the host to launch operators"
MS = 1e-3


def with_hosts(cluster: Cluster, *seconds: float) -> Cluster:
    """The cluster with hosts that need so many seconds to launch an operator, by kind of device."""
    groups = [
        replace(group, device=replace(group.device, host_seconds=each))
        for group, each in zip(cluster.groups, seconds, strict=True)
    ]
    return replace(cluster, groups=tuple(groups))


def quick_devices(count: int) -> Cluster:
    """Devices and links that are done as soon as something is launched, which takes their hosts a millisecond."""
    return Cluster.uniform(
        count, flops=1e15, memory_bandwidth=1e15, latency=1e-12, bandwidth=1e15, host_seconds=MS
    )  # fmt: skip


@functools.cache
def two_blocks() -> Graph:
    return of_module(Mlp(layers=2, size=32))


def planned(graph: Graph, cluster: Cluster, **fix: Any) -> Plan:
    return plan_step(graph, cluster, read_demands(fix))


#: Launches of ``Mlp(layers=2)`` forward and backward: a linear 1 and a gradient for each of input (but the first's),
#: weight and bias; norm, gelu, addition, loss 1 and 1. First 1 + 2, two blocks of 5 + 9, last and loss 2 + 4.
ALONE = 37


@pytest.mark.parametrize(
    ("num_devices", "fix", "launches"),
    [
        (1, {}, ALONE),
        # a block computes norm, up and gelu again, the last linear itself for its loss
        (1, {"recompute": "full"}, ALONE + 2 * 3 + 1),
        # norm and gelu
        (1, {"recompute": "selective"}, ALONE + 2 * 2),
        # each of four units adds up its gradients
        (1, {"num_microbatches": 4}, 4 * (ALONE + 4)),
        # the loss is summed over samples; each unit copies its gradients for the reduction at the end of the step
        (2, {"dp": 2, "zero": 0}, ALONE + 1 + 4),
        # each unit scatters its gradients too
        (2, {"dp": 2, "zero": 2, "num_microbatches": 2}, 2 * (ALONE + 1 + 4 + 4)),
        # each unit gathers its weights and lays them out, forward and backward
        (2, {"dp": 2, "zero": 3}, ALONE + 1 + 4 + 4 + 4 * 2 * 2),
        (2, {"pp": 2}, ALONE),
    ],
)
def test_a_step_takes_the_launches_of_one_device(num_devices: int, fix: Mapping[str, Any], launches: int) -> None:
    plan = planned(two_blocks(), quick_devices(num_devices), **fix)
    assert plan.certificate.objective == pytest.approx(launches * MS, rel=1e-6)  # the optimizer takes nanoseconds


def test_collectives_of_a_tensor_axis_are_launched_too() -> None:
    """Each of two blocks sums its rows forward, and the gradients of its input backward; neither runs again."""
    pins = {"layers.*.up:*": {"tp": "cut n"}, "layers.*.down:*": {"tp": "cut k"}}
    module = seeded(functools.partial(Mlp, layers=2, size=32))
    options: dict[str, Any] = {"example_inputs": mlp_batch(size=32), "loss_fn": squared_error, "fuse": False}
    plan = planner.plan(module, quick_devices(2), fix={"tp": 2}, constraints=pins, **options)
    issued = sum(each.count for each in plan.collectives if each.axis == "tp")
    assert plan.certificate.objective == pytest.approx((ALONE + issued) * MS, rel=1e-6) and issued == 2 * 2
    full = planner.plan(module, quick_devices(2), fix={"tp": 2, "recompute": "full"}, constraints=pins, **options)
    issued_again = sum(each.count for each in full.collectives if each.axis == "tp") - issued
    # norm, up and gelu of both blocks and the last linear; what a block passes on was summed once
    assert full.certificate.objective == pytest.approx((ALONE + issued + 2 * 3 + 1) * MS, rel=1e-6)
    assert issued_again == 0
    free = planner.plan(module, quick_devices(2), fix={"tp": 2}, **options)
    assert not free.collectives and free.certificate.objective == pytest.approx(ALONE * MS, rel=1e-6)


def test_micro_batches_of_a_pipeline_are_launched_by_each_stage() -> None:
    """Of stages of 1 + 2 + 5 + 9 and 5 + 9 + 2 + 4 launches; four micro-batches add gradients twice on each."""
    plan = planned(two_blocks(), quick_devices(2), pp=2, num_microbatches=4, schedule="1f1b")
    assert plan.certificate.objective == pytest.approx((4 * (20 + 2) + (17 + 2)) * MS, rel=1e-6)


def test_a_host_that_takes_no_time_changes_no_plan() -> None:
    free, plain = (planned(two_blocks(), each) for each in (with_hosts(two_boxes(), 0.0), two_boxes()))
    assert "waiting for the host" not in free.summary()
    assert free.to_json() == plain.to_json() and "host_forward" not in free.to_json()
    slower = planned(two_blocks(), with_hosts(two_boxes(), 1e-5))
    assert '"host_seconds": 1e-05' in slower.to_json() and '"host_forward"' in slower.to_json()
    assert slower.certificate.objective > plain.certificate.objective
    waits = sum(
        count * (parts.host_forward + parts.host_backward)
        for chunk in slower.step.chunks
        for (_, count), parts in zip(chunk.costs.layers, chunk.parts, strict=True)
    )
    assert slower.step.axes["pp"] == 1 and slower.step.num_microbatches == 1
    share = f"{waits / slower.step.costs.seconds:.1%}"
    assert f"waiting for the host to launch operators: {share} of the step" in slower.summary()
    assert Plan.from_dict(json.loads(slower.to_json())) == slower


@pytest.mark.parametrize("host", [1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize(
    "fix",
    [
        {},
        {"recompute": "full", "tp": 2, "cp": 2, "zero": 3},
        {"recompute": "selective", "pp": 2, "zero": 2},
        {"recompute": "regather", "tp": 2},
        {"schedule": "zb_h1", "pp": 2, "num_microbatches": 4},
        {"schedule": "interleaved_1f1b", "pp": 2, "tp": 2, "num_microbatches": 4},
    ],
    ids=str,
)
def test_audit_prices_and_waterfall_tell_the_objective(fix: dict[str, Any], host: float) -> None:
    pytest.importorskip("transformers")
    graph, cluster = _llama(), with_hosts(two_boxes(), host)
    plan = planned(graph, cluster, **fix)
    objective = plan.certificate.objective
    assert reprice(graph, plan, cluster).seconds.total == pytest.approx(objective, rel=1e-12)
    ledger = objective_ledger(graph, plan, cluster)
    assert ledger.total == pytest.approx(objective, rel=1e-12)
    played = simulated_step(plan)
    bars = {bar.name: bar.seconds for bar in waterfall(plan, played)}
    assert sum(bars.values()) == pytest.approx(played.seconds, rel=1e-12)
    if host >= 1e-5:
        assert bars[HOST] > 0.4 * played.seconds and ledger.rest[HOST] > 0.4 * objective
    for chunk in plan.step.chunks:
        for (costs, _), parts in zip(chunk.costs.layers, chunk.parts, strict=True):
            assert (parts.forward, parts.backward) == pytest.approx((costs.forward, costs.backward), rel=1e-12)


@functools.cache
def _llama() -> Graph:
    return of_config("tiny-llama", num_hidden_layers=4)


def test_a_plan_is_audited_and_explained_and_other_launches_are_found_out() -> None:
    options: dict[str, Any] = {"example_inputs": mlp_batch(size=32), "loss_fn": squared_error}
    module = seeded(functools.partial(Mlp, layers=2, size=32))
    plan = planner.plan(module, with_hosts(two_boxes(), 1e-5), fuse=False, **options)
    report = planner.audit(plan, module, **options)
    assert report.ok, report.table()
    prices = plan.explain("*", model=module, **options).prices
    assert sum(prices.values()) == pytest.approx(plan.certificate.objective, rel=1e-9)
    assert prices[HOST] > 0.5 * plan.certificate.objective
    device = {**plan.cluster["device"], "host_seconds": 2e-5}
    tampered = replace(plan, cluster={**plan.cluster, "device": device})
    assert not planner.audit(tampered, module, **options).ok


def test_tensor_parallelism_does_not_help_where_the_host_is_the_slowest() -> None:
    """Eight devices on its axis are more than five times as fast as one where launches cost nothing, else no faster."""
    graph = of_module(Mlp(layers=2, size=128, hidden=512), size=128)
    gains = []
    for devices in (slow_devices(8), with_hosts(slow_devices(8), 1e-1)):
        cut, whole = (planned(graph, devices, dp=1, cp=1, pp=1, tp=8), planned(graph, devices.subset(1)))
        gains.append(whole.certificate.objective / cut.certificate.objective)
    assert gains[0] > 5 and gains[1] == pytest.approx(1.0, abs=0.02)


def test_larger_micro_batches_win_where_the_host_is_the_slowest() -> None:
    devices, graph = slow_devices(8), MODELS["6-block mlp"]()
    free, bound = (planned(graph, each, pp=4) for each in (devices, with_hosts(devices, 1e-5)))
    assert free.step.num_microbatches == 4 and bound.step.num_microbatches == 1
    assert bound.step.local_batch > free.step.local_batch


@pytest.mark.parametrize("host", [1e-6, 1e-5])
@pytest.mark.parametrize("fix", [{}, {"pp": 2, "zero": (0, 3), "recompute": ("none", "full")}], ids=str)
def test_search_finds_the_fastest_of_all(fix: dict[str, Any], host: float) -> None:
    cluster = with_hosts(two_boxes(), host)
    search = Search(LevelOne(cluster, *space("2-block mlp")), cluster, read_demands(fix, gap=0.0, time_limit=600.0))
    outcome = search.run()
    best = outcome.solutions[0]
    assert best.seconds == pytest.approx(fastest_of_all(search).seconds, rel=1e-9)
    assert best.seconds == pytest.approx(step_seconds(as_step(best.problem, best.assignment)).total, rel=1e-9)
    assert outcome.bound == pytest.approx(best.seconds, rel=1e-9)


@pytest.mark.parametrize("host", [1e-6, 1e-5])
@pytest.mark.parametrize("fix", [{"pp": 1, "recompute": ("none", "full")}, {"pp": 4, "zero": 0}], ids=str)
def test_no_plan_takes_less_than_the_bounds(fix: dict[str, Any], host: float) -> None:
    cluster, chooser = with_hosts(two_boxes(), host), random.Random(0)
    search = Search(LevelOne(cluster, *space("2-block mlp")), cluster, read_demands(fix, time_limit=600.0))
    for entry in search._first_entries():
        sharded, alone = search.sharded(entry.candidate), search.fastest(entry.candidate)
        assert sharded is not None and alone is not None
        optimum = fastest(search.problem(entry.candidate, sharded), chooser).seconds
        launched = replace(entry, launched=max(entry.launched, sharded.variant.launched))
        assert entry.bound <= optimum * (1.0 + 1e-9)
        assert search._bound(launched, alone.least_seconds) <= optimum * (1.0 + 1e-9)


@pytest.mark.parametrize("host", [5e-6, 1e-4])
def test_no_pinned_sharding_is_faster(host: float) -> None:
    """All ways to cut ``up``, ``down`` and ``last``. What is fastest on the devices alone takes up to a third more."""
    cluster, demands = with_hosts(slow_devices(4), host), read_demands({"tp": 4, "pp": 1}, gap=0.0, time_limit=600.0)

    def search(*choices: Any) -> Search:
        return Search(LevelOne(cluster, *space_under(*choices)), cluster, demands)

    free = search()
    (best, *_), pinned = free.run().solutions, []
    for choices in itertools.product((NOT_CUT, COLUMNS, ROWS), repeat=3):
        solutions = search(*choices).run().solutions
        pinned += [solution.seconds for solution in solutions[:1]]
    assert len(pinned) > 10 and best.seconds == pytest.approx(min(pinned), rel=1e-9)
    assert best.candidate.bound(best.sharded.variant.launched) <= best.seconds
    alone = free.fastest(best.candidate)
    assert alone is not None and alone.seconds < best.sharded.seconds
    assert best.sharded.least_seconds == pytest.approx(alone.least_seconds, rel=1e-9)


def test_stages_on_unequal_devices_are_launched_by_their_own_hosts() -> None:
    options: dict[str, Any] = {"fix": {"pp": 2, "tp": 1, "num_microbatches": 1, "zero": 0}, "fuse": False, **CALL}
    alike = planner.plan(model(), with_hosts(two_kinds(1.0, 1.0), 1e-3, 1e-3), **options)
    slower = planner.plan(model(), with_hosts(two_kinds(1.0, 1.0), 1e-3, 4e-3), **options)
    assert slower.certificate.bound <= slower.certificate.objective
    layers = [sum(group.count for group in chunk.groups) for chunk in slower.step.chunks]
    of_alike = [sum(group.count for group in chunk.groups) for chunk in alike.step.chunks]
    ranks = {device.name: rank for rank, device in enumerate(slower.step.stage_devices)}
    assert layers[ranks["b"]] < min(of_alike)  # every unit that the slower host launches prolongs the step
    for plan in (alike, slower):
        report = planner.audit(plan, model(), **CALL)
        assert report.ok, report.table()
    reasons = slower.explain("*", model=model(), **CALL)
    assert sum(reasons.prices.values()) == pytest.approx(slower.certificate.objective, rel=1e-6)
    assert with_hosts(two_kinds(1.0, 1.0), 1e-3, 4e-3).device.host_seconds == 4e-3


@pytest.mark.parametrize("hosts", [(2e-6, 2e-5), (2e-5, 2e-5), (1e-5, 1e-4)], ids=str)
def test_no_pinned_sharding_on_unequal_devices_is_below_the_bound(hosts: tuple[float, float]) -> None:
    """As ``test_unequal_shardings`` without hosts; one kind is three times as fast."""
    cluster = with_hosts(with_memory(two_kinds(3.0, 1.0), 1e9), *hosts)
    fix = {"pp": (2,), "tp": (2,), "num_microbatches": (1,), "recompute": ("none", "full")}
    demands = read_demands(fix, gap=1e-4, time_limit=600.0)
    free, best = search_with((), cluster, demands), math.inf
    outcome, further = free.run(), FurtherShardings(free, {})
    for choices in itertools.product((NOT_CUT, COLUMNS, ROWS), repeat=3):
        search = search_with(choices, cluster, demands)
        for entry in list(search._first_entries()):
            sharded = search.sharded(entry.candidate)
            solved = None if sharded is None else solve_stages(search.problem(entry.candidate, sharded), gap=0.0)
            if solved is not None and solved.assignment is not None:
                best = min(best, solved.objective)
                assert further.bound_by_units(entry.candidate, math.inf) <= solved.objective * (1.0 + 1e-9)
    assert 0.5 * best <= outcome.proved <= best * (1.0 + 1e-9)
    assert outcome.solutions[0].seconds <= best * 1.1


class OneSecond:
    """Prices of a second for each kernel, so that seconds are launches."""

    overlap_slowdown = 0.0

    def compute_seconds(self, **_: Any) -> float:
        return 1.0

    def collective_seconds(self, collective: str, **_: Any) -> float:
        return 1.0


@pytest.mark.parametrize("name", ["mlp", "mixture", "gpt2", "llama", "t5"])
def test_launches_are_the_kernels_that_are_priced(name: str) -> None:
    if name in ("gpt2", "llama", "t5"):
        pytest.importorskip("transformers")
    graph = {"mlp": two_blocks, "mixture": of_mixture}[name]() if name in ("mlp", "mixture") else MODELS[name]()
    pricing = StepPricing(OneSecond(), MeshShape.from_dict({"dp": 1}), states=frozenset(), fusion=Fusion())
    for node in graph.nodes:
        if node.constant:
            continue
        inputs, outputs = [("R",)] * len(node.inputs), [("R",)] * len(node.outputs)
        flops = forward_flops(node, graph.values)
        kernels = pricing.compute(node, graph.values, inputs, outputs, flops=flops, cut=1.0, live=True)
        assert pricing.launches(node, graph.values, inputs, outputs, flops=flops, live=True) == kernels, node.op
        assert pricing.launches(node, graph.values, inputs, outputs, flops=flops, live=False)[1] == 0


FILE = """
name = "here"
[device]
name = "GPU"
memory_bytes = 24e9
memory_bandwidth = 1e12
launch_overhead = 4e-6
host_seconds = 8e-6
flops = { float32 = 40e12 }
[[levels]]
name = "bus"
size = 2
latency = 1e-5
bandwidth = 1e10
"""


def test_a_cluster_file_may_say_it(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    path.write_text(FILE)
    cluster = Cluster.from_toml(path)
    assert cluster.device.host_seconds == 8e-6 and Cluster.from_dict(cluster.to_dict()) == cluster
    path.write_text(FILE.replace("host_seconds = 8e-6\n", ""))
    assert Cluster.from_toml(path).device.host_seconds == 0.0
    assert "host_seconds" not in Cluster.from_toml(path).to_dict()["device"]
    path.write_text(FILE.replace("8e-6", "-8e-6"))
    with pytest.raises(ValueError, match=r"device\.host_seconds must be a finite number of seconds, 0 or more"):
        Cluster.from_toml(path)


def test_the_report_names_it_where_it_is_priced() -> None:
    priced, plain = (planned(two_blocks(), each) for each in (quick_devices(1), slow_devices(1)))
    rows = {row[0]: row[1] for row in assumption_rows(priced)}
    assert rows["host, to launch an operator"] == "1 ms"
    assert "host, to launch an operator" not in {row[0] for row in assumption_rows(plain)}


def test_a_chain_is_enqueued_forward_and_backward() -> None:
    """For form: on processors this is the operators' own time."""
    cpu = torch.device("cpu")
    chain = launched_chain(torch.bfloat16, cpu, length=20)
    (gradient,) = chain()
    assert gradient.dtype == torch.bfloat16 and bool((gradient == 1).all())
    assert seconds_to_enqueue(chain, cpu, agree=lambda seconds: seconds, operators=40) > 0.0


def test_hosts_of_accelerators_alone_are_measured(tmp_path: Path) -> None:
    """The meta device is one that computes nothing: what is left is the host."""
    told: list[str] = []
    run = _Run(torch.device("cpu"), 0, 1, 1, "here", tmp_path / "calls.csv", 1.0, told.append)
    _host(run, "bfloat16")
    assert not run.calls and len(told) == 1 and "host_seconds stays 0" in told[0]
    _host(replace(run, device=torch.device("meta")), "bfloat16")
    (call,) = run.calls
    assert (call.kind, call.place) == ("host", "bfloat16") and call.seconds > 0


def test_what_was_measured_of_the_host_is_fitted() -> None:
    calls = calls_of(TRUE)
    launch = next(call for call in calls if call.kind == "launch")
    assert fitted(calls).device.host_seconds == 0.0
    assert fitted([*calls, replace(launch, kind="host", seconds=7e-6)]).device.host_seconds == 7e-6
