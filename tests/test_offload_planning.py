"""Optimizer state in the hosts' memory as a choice of planning: bytes, seconds, refusals, and when it is taken."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Any

import pytest

import planner
from cost_models import Cluster
from cost_models.hardware import DeviceGroup
from cost_models.host import Host
from passes.plan import Plan
from passes.plan.host_memory import host_bytes_by_node
from passes.plan.step_plan import ACTIVATIONS, ALL, ON_HOST, OPTIMIZER, RankMemory
from planner.inspection.simulated_step import simulated_step
from planner.inspection.time_waterfall import waterfall

pytestmark = pytest.mark.usefixtures("models_traced_once")

#: Llama-65B on 16 A100s, as published: pp8 · dp2, micro-batches of 8, ZeRO 1, state on the hosts.
PUBLISHED = {
    "pp": 8, "dp": 2, "cp": 1, "tp": 1, "micro_batch": 8, "zero": 1, "schedule": "1f1b", "recompute": "full",
}  # fmt: skip
ONE = {"pp": 1, "dp": 2, "cp": 1, "tp": 1}
FAST = Host(1e12, 1e14, 1e14)


def plan_65b(offload: str, cluster: Cluster | str = "dgx-a100-80g:2") -> Plan:
    return planner.plan("llama-65b", cluster, global_batch=128, seq_len=2048, fix=PUBLISHED, offload=offload)


def plan_tiny(cluster: Cluster, offload: str, **options: Any) -> Plan:
    return planner.plan(
        "tiny-llama", cluster, global_batch=8, offload=offload, **{"fix": ONE, "seq_len": 16, **options}
    )


def hosted(host: Host | None, *, memory_bandwidth: float = 1e11) -> Cluster:
    return dataclasses.replace(
        Cluster.uniform(
            2, latency=0.0, flops=1e12, memory_bandwidth=memory_bandwidth, bandwidth=1e10, memory_bytes=1e10
        ),
        host=host,
    )


def test_llama_65b_fits_on_16_a100s_with_783_gb_on_their_hosts() -> None:
    with pytest.raises(ValueError, match="no plan fits in memory"):
        plan_65b("never")
    plan = plan_65b("auto")
    nodes = host_bytes_by_node(plan.step.axes, plan.step.memory, 8)
    assert plan.step.offload == OPTIMIZER and len(nodes) == 2
    assert sum(nodes) == pytest.approx(783e9, rel=0.05)
    assert all(rank.optimizer == 0 for rank in plan.step.memory)
    assert "optimizer state in the hosts' memory: 729.6 GiB" in plan.summary()


def test_a_host_that_is_too_small_is_refused_with_its_bytes() -> None:
    cluster = Cluster.parse("dgx-a100-80g:2")
    assert cluster.host is not None
    small = dataclasses.replace(cluster, host=dataclasses.replace(cluster.host, memory_bytes=300e9))
    with pytest.raises(ValueError, match=r"takes 36\d\.\d GiB on the fullest host at least, of whose 279\.4 GiB"):
        plan_65b(OPTIMIZER, small)


def test_a_cluster_without_a_host_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has no \[host\] table"):
        plan_tiny(hosted(None), OPTIMIZER)
    with pytest.raises(ValueError, match=r"offload='activations' needs to know .* has no \[host\] table"):
        plan_tiny(hosted(None), ACTIVATIONS)
    with pytest.raises(ValueError, match=r"recompute='offload' needs to know .* has no \[host\] table"):
        plan_tiny(hosted(None), "never", fix={**ONE, "recompute": ["full", ON_HOST]})
    with pytest.raises(
        ValueError, match="offload must be one of never, auto, optimizer, activations, all, got 'state'"
    ):
        plan_tiny(hosted(None), "state")
    assert plan_tiny(hosted(None), "auto").step.offload == ""


def test_too_little_memory_is_refused_with_what_would_help() -> None:
    with pytest.raises(ValueError, match=r"no plan fits in memory: .* or 6 devices of this kind \("):
        plan_tiny(
            hosted(Host(1e12, 1e11, 1e10)), OPTIMIZER, fix={"tp": 1, "cp": 1}, memory_limit=1e6, headroom=0.0,
            seq_len=256, optimizer="sgd",
        )  # fmt: skip


def test_unequal_devices_are_refused() -> None:
    equal = hosted(Host(1e12, 1e11, 1e10))
    device = dataclasses.replace(equal.device, name="slower", memory_bandwidth=1e10)
    unequal = dataclasses.replace(equal, groups=(DeviceGroup(equal.device, 1), DeviceGroup(device, 1)))
    with pytest.raises(ValueError, match="is planned on equal devices"):
        plan_tiny(unequal, OPTIMIZER)


def test_state_that_fits_stays_on_devices_unless_the_host_is_faster() -> None:
    slow, fast = Host(1e12, 1e9, 1e8), Host(1e12, 1e14, 1e14)
    never, auto = plan_tiny(hosted(slow), "never"), plan_tiny(hosted(slow), "auto")
    assert auto.step.offload == "" and auto.step.costs == never.step.costs
    assert auto.certificate.bound <= never.certificate.bound
    assert plan_tiny(hosted(fast, memory_bandwidth=1e9), "auto").step.offload == OPTIMIZER


def test_seconds_are_those_of_link_and_host_memory() -> None:
    """Of 1,000 bfloat16 elements: 3 · 2 bytes over half a link, 4 + 24 + 2 bytes touched by each of two devices."""
    host = Host(1e12, memory_bandwidth=1e6, link_bandwidth=1e4, link_shared_by=2)
    seconds = host.update_seconds(carried_bytes=6000, touched_bytes=30000, num_devices=2)
    assert seconds == pytest.approx(6000 * 2 / 1e4 + 2 * 30000 / 1e6)
    plans = [
        plan_tiny(hosted(Host(1e12, 1e9 * factor, 1e9 * factor)), OPTIMIZER, fix={**ONE, "zero": 1})
        for factor in (1, 2)
    ]
    gathered = 2 * plans[1].step.costs.update - plans[0].step.costs.update
    assert 0 <= gathered < plans[1].step.costs.update


def plan_blocks(host: Host, offload: str, memory_limit: float = 1e10, **fix: Any) -> Plan:
    """Tiny Llama on long sequences, with nothing divided, recomputed or cut into micro-batches."""
    return plan_tiny(
        hosted(host), offload, seq_len=256, optimizer="sgd", fix={**ONE, "zero": 0, "num_microbatches": 1, **fix},
        forbid={"recompute": ["regather", "selective", "full", "chunked_loss"]}, memory_limit=memory_limit,
        headroom=0.0,
    )  # fmt: skip


def test_activations_that_do_not_fit_go_to_the_host() -> None:
    """All that blocks make and keep; what goes into each stays, and two blocks' worth is on its way."""
    whole = plan_blocks(FAST, ACTIVATIONS)
    assert whole.step.recompute == ("none",) and whole.step.memory[0].host == 0.0
    limit = 0.9 * whole.step.memory[0].total
    with pytest.raises(ValueError, match="no plan fits in memory"):
        plan_blocks(FAST, "never", limit)
    plan = plan_blocks(FAST, ACTIVATIONS, limit)
    (chunk,), (memory,) = plan.step.chunks, plan.step.memory
    away = [(group, layer) for group, layer in zip(chunk.groups, chunk.costs.layers) if group.recompute == ON_HOST]
    assert memory.host == sum(count * costs.host_bytes for _, (costs, count) in away) > 0
    assert all("layers" in group.unit for group, _ in away)
    assert memory.activations + memory.host == whole.step.memory[0].activations and memory.total <= limit
    assert memory.transient - whole.step.memory[0].transient == pytest.approx(2 * away[0][1][0].host_bytes, rel=0.05)
    assert "activations in the hosts' memory" in plan.summary()


@pytest.mark.parametrize("speed", [1e6, 1e14])
def test_seconds_are_what_the_link_takes_longer_than_the_block(speed: float) -> None:
    """A block of ``host_bytes`` over a link of its own and a host's memory that two devices share."""
    plan = plan_blocks(Host(1e12, memory_bandwidth=speed, link_bandwidth=speed), ACTIVATIONS, recompute=ON_HOST)
    (chunk,) = plan.step.chunks
    (place,) = (place for place, group in enumerate(chunk.groups) if group.recompute == ON_HOST)
    costs, parts = chunk.costs.layers[place][0], chunk.parts[place]
    carried = costs.host_bytes * (1 / speed + 2 / speed)
    assert costs.forward == pytest.approx(max(carried, costs.forward - parts.carry_forward))
    assert costs.backward == pytest.approx(max(carried, costs.backward - parts.carry_backward))
    assert (parts.carry_forward > 0) == (speed < 1e14)


def test_a_host_that_cannot_hold_activations_has_none() -> None:
    """Unless they are demanded there."""
    small = dataclasses.replace(FAST, memory_bytes=1e3)
    with pytest.raises(ValueError, match="no plan fits in memory"):
        plan_blocks(small, ACTIVATIONS, 0.9 * plan_blocks(FAST, "never").step.memory[0].total)
    with pytest.raises(ValueError, match=r"no plan fits in the hosts' memory: what is there \(activations\) takes"):
        plan_blocks(small, ACTIVATIONS, recompute=ON_HOST)


def test_what_is_on_hosts_is_counted_node_by_node() -> None:
    memory = [RankMemory(0, 0, 0, 0, 0, host=value) for value in (1.0, 10.0)]
    assert host_bytes_by_node({"dp": 2, "pp": 2, "tp": 2}, memory, 4) == [22.0, 22.0]
    assert host_bytes_by_node({"pp": 2, "dp": 2, "tp": 2}, memory, 4) == [4.0, 40.0]


@pytest.mark.parametrize(("offload", "fix"), [(OPTIMIZER, {}), (ALL, {"recompute": ON_HOST})])
def test_such_a_plan_is_saved_audited_and_explained(tmp_path: Path, offload: str, fix: dict[str, Any]) -> None:
    plan = plan_tiny(hosted(Host(1e12, 1e11, 1e10)), offload, fix={**ONE, "zero": 1, **fix})
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.step == plan.step
    report = planner.audit(loaded, "tiny-llama")
    assert report.ok, report
    played = simulated_step(plan)
    assert sum(bar.seconds for bar in waterfall(plan, played)) == pytest.approx(played.seconds)
    cheaper = dataclasses.replace(loaded.step.memory[0], host=1.0)
    tampered = dataclasses.replace(loaded, step=dataclasses.replace(loaded.step, memory=(cheaper,)))
    assert not planner.audit(tampered, "tiny-llama").ok


def test_a_host_is_read_and_written() -> None:
    data = Cluster.parse("dgx-a100-40g:2").to_dict()
    assert Cluster.from_dict(data).host == Host(1e12, 409.6e9, 24e9, 2)
    with pytest.raises(ValueError, match=r"host\.level must be one of the levels nvlink, network"):
        Cluster.from_dict({**data, "host": {**data["host"], "level": "rack"}})
    for change, message in {
        ("levels", "nvlink"): r"host has an unknown field 'levels', did you mean 'level'\?",
        ("link_shared_by", 0): r"host\.link_shared_by must be an integer of at least 1 and at most .*, got 0",
        ("link_bandwidth", "fast"): r"host\.link_bandwidth must be a number above 0, got 'fast'",
        ("memory_bytes", datetime.date(2026, 1, 1)): "host has a value that is no number, text, list or table: .* date",
    }.items():
        with pytest.raises(ValueError, match=message):
            Cluster.from_dict({**data, "host": {**data["host"], change[0]: change[1]}})
    with pytest.raises(ValueError, match="host needs 'memory_bandwidth'"):
        Cluster.from_dict({**data, "host": {"memory_bytes": 1e12}})
