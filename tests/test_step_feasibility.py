"""Models that are known to fit on given devices, and not to: float32, AdamW, everything trained."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from cost_models import Cluster
from passes.ir.graph import Graph
from passes.plan import Plan
from planner.planning import capture_for_planning
from planner.whole_step.candidates import relaxations
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.plan_step import plan_step
from tests.cells import cells

pytestmark = pytest.mark.usefixtures("models_traced_once")

GIB = 2**30
#: For the largest graph only the micro-batch, the policies of recomputation and ZeRO are left to choose; the others
#: split no sequences.
ON_ONE_NODE = {"pp": 1, "cp": 1, "dp": 2, "tp": 4}
WHOLE_SEQUENCES = {"cp": 1}
#: Within each node, and a pipeline over the eight: of all meshes of 64 devices ``SLOW`` tries more.
IN_EACH_NODE = {"cp": 1, "tp": 8, "pp": 8}
FITTING = [
    ("bart-large", 1024, "8x1080ti:1x2", 8, WHOLE_SEQUENCES),
    ("llama-7b", 1024, "dgx-a100-40g:1x4", 8, WHOLE_SEQUENCES),
    ("opt-66b", 512, "dgx-v100-32g:8", 16, IN_EACH_NODE),
]
SLOW = [
    ("gpt2-large", 512, "8x1080ti:1x2", 8, WHOLE_SEQUENCES),
    ("t5-11b", 512, "dgx-v100-32g", 8, ON_ONE_NODE),
    ("opt-66b", 512, "dgx-v100-32g:8", 16, WHOLE_SEQUENCES),
]


@functools.cache
def graph_of(name: str, *, seq_len: int, batch: int = 8) -> Graph:
    return capture_for_planning(name, batch_size=batch, seq_len=seq_len, dtype="float32")


def any_plan(
    graph: Graph, cluster: Cluster | str, fix: dict | None = None, forbid: dict | None = None, **options
) -> Plan:
    """The first plan that fits: how fast it is does not matter here."""
    hardware = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    return plan_step(graph, hardware, read_demands(fix, forbid, gap=0.9, **options))


def why_not(graph: Graph, cluster: str, fix: dict | None = None, forbid: dict | None = None, **options) -> str:
    with pytest.raises(ValueError) as raised:
        any_plan(graph, cluster, fix, forbid, **options)
    return str(raised.value)


@pytest.mark.parametrize("name, seq_len, cluster, batch, fix", cells(FITTING, SLOW))
def test_models_that_fit(name: str, seq_len: int, cluster: str, batch: int, fix: dict[str, int]) -> None:
    graph = graph_of(name, seq_len=seq_len, batch=batch)
    plan = any_plan(graph, cluster, fix)
    assert plan.step is not None
    assert max(rank.total for rank in plan.step.memory) <= Cluster.parse(cluster).device.usable_bytes
    # the state cannot be less than the parameters' share of sixteen bytes each, nor can the plan's state add up to less
    elements = sum(state.value.num_elements for state in graph.parameters)
    held = sum(rank.parameters + rank.gradients + rank.optimizer for rank in plan.step.memory)
    assert held * plan.step.num_devices / plan.step.axes["pp"] >= 0.99 * 16 * elements


@functools.cache
def why_it_does_not_fit(name: str, cluster: str) -> str:
    return why_not(graph_of(name, seq_len=1024), cluster)


def lacking(message: str) -> float:
    """GiB that an error says are missing."""
    return float(message.partition("lacks ")[2].partition(" GiB")[0])


def lacking_at_least(graph: Graph, cluster: str) -> float:
    """GiB missing for the state alone, sixteen bytes for each parameter over all devices."""
    hardware = Cluster.parse(cluster)
    elements = sum(state.value.num_elements for state in graph.parameters)
    return (16 * elements / hardware.num_devices - hardware.device.usable_bytes) / GIB


@pytest.mark.parametrize(
    "name, cluster, needed", [("llama-13b", "dgx-a100-40g:1x4", 8), ("opt-30b", "dgx-v100-32g", 16)]
)
def test_models_that_do_not_fit(name: str, cluster: str, needed: int) -> None:
    graph = graph_of(name, seq_len=1024)
    message = why_it_does_not_fit(name, cluster)
    least = lacking_at_least(graph, cluster)
    assert least - 0.1 <= lacking(message) <= least + 2.0  # on top of the state there is little else for one sample
    assert "most of what it holds is optimizer state" in message
    assert f"{needed} devices of this kind" in message
    assert "devices with" in message


def test_what_is_said_to_help_does() -> None:
    graph = graph_of("llama-13b", seq_len=1024)
    assert any_plan(graph, "dgx-a100-40g:1x8").step is not None
    needed = float(why_it_does_not_fit("llama-13b", "dgx-a100-40g:1x4").partition("devices with ")[2].partition(" ")[0])
    roomy = Cluster.parse("dgx-a100-40g:1x4")
    device = dataclasses.replace(roomy.groups[0].device, memory_bytes=needed * GIB)
    roomy = dataclasses.replace(roomy, groups=(dataclasses.replace(roomy.groups[0], device=device),))
    assert any_plan(graph, roomy).step is not None


def test_plain_data_parallel_gpt2_large_does_not_fit_in_10_gb() -> None:
    graph = graph_of("gpt2-large", seq_len=512)
    plain = {"dp": 2, "tp": 1, "cp": 1, "pp": 1, "zero": 0}
    message = why_not(graph, "8x1080ti:1x2", plain)
    assert 16 * 0.774 / 1.0737 - 9.97 <= lacking(message) <= 16 * 0.774 / 1.0737 - 9.97 + 1.0  # 774 M parameters
    assert "allowing zero=1" in message
    assert any_plan(graph, "8x1080ti:1x2", {**plain, "zero": [0, 1]}).step is not None


def test_a_forbidden_recompute_policy_is_named_if_it_is_what_is_missing() -> None:
    graph = graph_of("gpt2-large", seq_len=512)
    demands = {"dp": 1, "tp": 2, "cp": 1, "pp": 1, "micro_batch": 8, "recompute": "none"}
    message = why_not(graph, "8x1080ti:1x2", demands)
    assert "most of what it holds is saved activations" in message
    assert "allowing recompute=" in message
    assert "micro_batch=" in message


def test_headroom_is_named_if_it_is_what_is_missing() -> None:
    message = why_not(graph_of("gpt2-large", seq_len=512), "8x1080ti:1x2", headroom=0.5)
    share = float(message.partition("a headroom of ")[2].partition(" ")[0])
    assert 0 < share < 0.5
    assert any_plan(graph_of("gpt2-large", seq_len=512), "8x1080ti:1x2", headroom=share).step is not None


def test_memory_limit_is_named_if_it_is_what_is_missing() -> None:
    graph = graph_of("tiny-llama", seq_len=32)
    message = why_not(graph, "cpu-local:2", WHOLE_SEQUENCES, memory_limit=1e5)
    limit = int(message.partition("memory_limit=")[2].partition(" ")[0])
    assert limit > 1e5
    assert any_plan(graph, "cpu-local:2", WHOLE_SEQUENCES, memory_limit=1.01 * limit).step is not None


def test_clusters_that_nobody_has_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    grown = relaxations._grown
    monkeypatch.setattr(relaxations, "MOST_DEVICES", 64)
    monkeypatch.setattr(
        relaxations, "_grown", lambda cluster, times: tried.append(cluster.num_devices * times) or grown(cluster, times)
    )
    assert "no plan fits in memory" in why_not(graph_of("tiny-llama", seq_len=32), "dgx-h100:1", memory_limit=1e3)
    assert tried == [16, 24, 32, 40, 48, 56, 64]  # once: there are no demands to drop


CONTRADICTIONS = [
    ({"tp": 3}, ["tp=3 cannot be met", "each must divide 8", "tp = 1, 2, 4, 8"]),
    ({"pp": 8}, ["pp=8 cannot be met", "at most 6", "pp = 1, 2, 4"]),
    ({"dp": 4, "micro_batch": 4, "zero": 1}, ["dp=4, micro_batch=4,", "dp = 1, 2; micro_batch = 1, 2"]),
    ({"pp": 1, "schedule": "gpipe", "tp": 2}, ["contradict each other: pp=1, schedule=gpipe,", "pp = 2, 4"]),
    ({"dp": 2, "micro_batch": 2, "num_microbatches": 4}, ["contradict each other", "num_microbatches = 2"]),
    ({"pp": 4, "schedule": "interleaved_1f1b"}, ["pp=4, schedule=interleaved_1f1b", "pp = 2; schedule = 1f1b, gpipe"]),
    ({"dp": 2, "tp": 2, "pp": 1, "cp": 1}, ["pp=1, dp=2, cp=1, tp=2", "pp = 2; dp = 4; cp = 2; tp = 4"]),
]  # fmt: skip


@pytest.mark.parametrize("fix, parts", CONTRADICTIONS, ids=[" ".join(fix) for fix, _ in CONTRADICTIONS])
def test_demands_that_contradict_each_other_are_named(fix: dict, parts: list[str]) -> None:
    message = why_not(graph_of("tiny-llama", seq_len=32), "cpu-local:8", fix)
    assert all(part in message for part in parts), message


def test_demands_that_have_no_part_in_a_contradiction_are_not_named() -> None:
    message = why_not(graph_of("tiny-llama", seq_len=32), "cpu-local:8", {"tp": 3, "recompute": "full"}, {"zero": 3})
    assert "recompute" not in message
    assert "zero" not in message


def test_forbidding_all_values_of_a_choice_is_an_error() -> None:
    with pytest.raises(ValueError, match="leave no value of 'recompute'"):
        read_demands({"recompute": "full"}, {"recompute": "full"})
    with pytest.raises(ValueError, match="leave no value of 'zero'"):
        read_demands({}, {"zero": [0, 1, 2, 3]})
