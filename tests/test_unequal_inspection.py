"""What explains plans on unequal devices: each operator is priced on the devices of its stage."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

import planner
from cost_models import Cluster
from passes.plan import Plan
from passes.plan.step_plan import StageDevice
from planner.inspection.objective_ledger import objective_ledger
from planner.inspection.plan_graph import graph_of_plan
from tests.small_models import Mlp, mlp_batch, seeded, squared_error
from tests.test_unequal_devices import mixed_plan

pytestmark = pytest.mark.usefixtures("models_traced_once")
CALL: dict[str, Any] = {"example_inputs": mlp_batch(batch=16, size=32), "loss_fn": squared_error}


def model() -> Any:
    return seeded(functools.partial(Mlp, layers=8, size=32))


def two_kinds(*speeds: float, names: tuple[str, str] = ("a", "b")) -> Cluster:
    """Two devices of each kind, so many times as fast, on the same links."""

    def kind(name: str, speed: float) -> dict[str, Any]:
        return {
            "name": name, "count": 2, "flops": {"float32": speed * 1e9}, "memory_bytes": 1e9,
            "memory_bandwidth": speed * 1e9, "launch_overhead": 0.0,
        }  # fmt: skip

    bus = {"name": "bus", "size": 2, "latency": 1e-6, "bandwidth": 1e8}
    network = {"name": "network", "size": 2, "latency": 1e-5, "bandwidth": 5e8}
    kinds = [kind(name, speed) for name, speed in zip(names, speeds, strict=True)]
    return Cluster.from_dict({"name": "two kinds", "devices": kinds, "levels": [bus, network]})


@functools.cache
def plan_of(*speeds: float, names: tuple[str, str] = ("a", "b"), micro_batches: int = 1, tp: int = 2) -> Plan:
    fix = {"pp": 2, "tp": tp, "num_microbatches": micro_batches}
    return planner.plan(model(), two_kinds(*speeds, names=names), fix=fix, fuse=False, **CALL)


@pytest.mark.parametrize("plan", [mixed_plan, functools.partial(plan_of, 1.5, 1.0, micro_batches=4)])
def test_the_prices_sum_to_the_objective(plan: Any) -> None:
    decided = plan()
    reasons = decided.explain("*", model=model(), **CALL)
    assert sum(reasons.prices.values()) == pytest.approx(decided.certificate.objective, rel=1e-6)
    for reason in reasons.operators:
        assert sum(seconds for _, _, seconds in reason.devices) == pytest.approx(reason.here, rel=1e-9)
        assert sum(copies for _, copies, _ in reason.devices) == reason.copies
    equal = plan_of(1.0, 1.0, names=("a", "a")).explain("*", model=model(), **CALL)
    assert not any(reason.devices for reason in equal.operators)


def test_a_copy_takes_as_much_longer_as_its_device_is_slower() -> None:
    plan = plan_of(1.5, 1.0, micro_batches=4)
    (reason,) = plan.explain("layers.1.up", model=model(), **CALL).operators
    with graph_of_plan(plan, model(), **CALL) as graph:
        ledger = objective_ledger(graph, plan, Cluster.from_dict(plan.cluster))
        node = next(node.name for node in graph.nodes if node.key == reason.key)
    seconds = {}
    for stage in ledger.stages:
        charge = next(charge for charge in stage.walk.charges if charge.name == node and charge.step is None)
        seconds[stage.name] = charge.compute
        copies, here = next((count, part) for where, count, part in reason.devices if where.endswith(stage.name))
        counted = stage.shares[node].of(charge.compute)  # of one copy: all copies of the unit together, by their number
        assert here == pytest.approx(reason.copies * counted, rel=1e-9) and copies
    assert seconds["b"] == pytest.approx([1.5 * part for part in seconds["a"]], rel=1e-9)


def test_a_plan_that_states_the_seconds_of_other_devices_is_refused() -> None:
    plan = plan_of(1.5, 1.0, micro_batches=4)
    cluster = two_kinds(1.0, 1.5)
    with pytest.raises(ValueError, match="states an objective"):
        dataclasses.replace(plan, cluster=cluster.to_dict()).explain("layers.1.up", model=model(), **CALL)


def test_devices_that_differ_in_name_alone_are_explained_as_equal_ones_are() -> None:
    plan = plan_of(1.0, 1.0, names=("a", "a"), micro_batches=2)
    limit = plan.step.memory_limit
    ranks = (StageDevice("a", limit), StageDevice("b", limit))
    step = dataclasses.replace(plan.step, stage_devices=ranks)
    twin = dataclasses.replace(plan, cluster=two_kinds(1.0, 1.0).to_dict(), step=step)
    for name in ("layers.1.up", "layers.2.down"):
        ours, theirs = (each.explain(name, model=model(), **CALL) for each in (plan, twin))
        assert theirs.prices == pytest.approx(ours.prices, rel=1e-9)
        (one,), (other,) = ours.operators, theirs.operators
        assert not one.devices and len(other.devices) == 2
        assert one.rivals and other.rivals and len(one.rivals) == len(other.rivals) > 2
        for equal, unequal in zip(one.rivals, other.rivals, strict=True):
            assert equal.strategy == unequal.strategy
            for figure in ("here", "neighbours", "objective", "memory"):
                assert getattr(unequal, figure) == pytest.approx(getattr(equal, figure), rel=1e-9, abs=1e-15)


def test_a_rival_costs_what_a_plan_that_is_pinned_to_it_takes_more() -> None:
    plan = plan_of(1.5, 1.0)
    (reason,) = plan.explain("layers.2.down", model=model(), **CALL).operators
    change = next(rival.objective for rival in reason.rivals or () if rival.strategy == "not cut")
    pins = {"layers.*.down:*": {"tp": ["replicate", "invariant"]}}
    fix = {"pp": 2, "tp": 2, "num_microbatches": 1}
    pinned = planner.plan(model(), two_kinds(1.5, 1.0), fix=fix, fuse=False, constraints=pins, **CALL)
    units = [[sum(group.count for group in chunk.groups) for chunk in each.step.chunks] for each in (plan, pinned)]
    assert units[0] == units[1]
    assert change == pytest.approx(pinned.certificate.objective - plan.certificate.objective, rel=1e-6)


def test_lines_fit_into_a_terminal() -> None:
    reasons = plan_of(1.5, 1.0, micro_batches=4).explain("layers.1.up", model=model(), **CALL)
    assert max(map(len, reasons.table().splitlines())) <= 80 and "on rank 0, " in reasons.table()
