"""A cluster that is measured: curves through calls of a known device give it back; files, resuming, what is said."""

from __future__ import annotations

import functools
import itertools
import math
import random
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import planner
from benchmarks.accuracy import spearman
from cost_models import Cluster
from cost_models.collectives import ALGORITHMS, seconds_over
from cost_models.cost_model import CostModel
from cost_models.efficiency import Curve, Efficiency
from cost_models.hardware import Device, LinkLevel, Protocol
from cost_models.measured_profile import SAME_CALL, Extrapolation
from cost_models.routes import Span, route
from planner.calibration import call_timing, measure_machine, profile_machine
from planner.calibration.call_timing import cold, seconds_behind_compute, seconds_one_way
from planner.calibration.cluster_fit import fit_cluster
from planner.calibration.cluster_toml import as_toml
from planner.calibration.collective_cases import (
    ACROSS,
    ALONE,
    COLLECTIVES,
    HOST,
    NETWORK,
    SIZES,
    LinkGroups,
    link_groups,
    whole_elements,
)
from planner.calibration.curve_fit import fit_curve
from planner.calibration.levels_fit import fit_levels, predicted_seconds
from planner.calibration.measured_call import SAME, MeasuredCall, read_calls, write_calls
from planner.calibration.operator_cases import OperatorCase, operator_cases
from planner.cli import main
from tests.ranks import run_on_ranks

STREAMS = ("elementwise", "norm", "reduction", "gather", "copy", "fused_elementwise", "fused_norm", "optimizer")
PRODUCTS = Curve(((1e5, 0.2), (1e8, 0.6), (1e10, 0.9)))
TRUE = Device(
    "known", {"float32": 1e12}, 8e9, 1e11, 2e-6,
    efficiency={
        **dict.fromkeys(("matmul", "convolution", "attention", "attention_backward"), Efficiency(flops=PRODUCTS)),
        **dict.fromkeys(STREAMS, Efficiency(bytes=Curve(((1e4, 0.3), (1e7, 0.8))))),
    },
)  # fmt: skip


def calls_of(device: Device) -> list[MeasuredCall]:
    """What timing would give on ``device``, and of collectives on links of 10 GB/s that take 20 µs to start."""
    calls = [MeasuredCall("launch", "float32", "16", 0.0, 0.0, 1, device.launch_overhead)]
    for case in operator_cases():
        seconds = device.seconds(flops=case.flops, num_bytes=4 * case.elements, dtype="float32", kind=case.kind)
        shape = "x".join(map(str, case.shape))
        calls.append(MeasuredCall(case.kind, "float32", shape, case.flops, 4 * case.elements, 1, seconds))
    for groups in link_groups(8, 8):
        span = Span.of_link(groups.size, latency=20e-6, bandwidth=1e10)
        span = replace(span, protocols=(Protocol("true", 20e-6, 3e-6),))
        for collective in COLLECTIVES:
            for size in SIZES:
                seconds = seconds_over(collective, num_bytes=size, spans=(span,))
                calls.append(MeasuredCall(collective, "host", str(size), 0.0, float(size), groups.size, seconds))
    calls += [MeasuredCall(SAME, "float32", str(each), 1e8, 0.0, 1, 1e-3 * (1 + each / 100)) for each in range(21)]
    for what, seconds in (("compute", 2.0), ("communication", 1.5), ("together", 2.3)):
        calls.append(MeasuredCall("overlap", "host", what, 0.0, 0.0, 1, seconds))
    return calls


def fitted(calls: list[MeasuredCall], **more: Any) -> Cluster:
    options = {"world_size": 8, "per_host": 8, "memory": (8e9, 1e9), "main_dtype": "float32", **more}
    return fit_cluster(calls, name="fitted", machine="here", device_name="known", **options)


def test_a_known_device_is_given_back_by_its_calls() -> None:
    cluster = fitted(calls_of(TRUE))
    assert cluster.profile is not None
    medians = {name: each.median for name, each in cluster.profile.ranges.items()}
    assert medians == pytest.approx(dict.fromkeys(medians, 1.0), rel=0.06)
    assert {f"host: {each}" for each in COLLECTIVES} < medians.keys()
    assert cluster.device.overlap_slowdown == pytest.approx(0.2)
    again = cluster.profile.ranges[SAME_CALL]
    assert (again.low, again.high) == pytest.approx((1.01 / 1.1, 1.19 / 1.1)) and again.calls == 21
    prices = CostModel(cluster, {"dp": 4, "tp": 2})
    assert prices.compute_seconds(flops=1e9, num_bytes=1e6, dtype="float32") == pytest.approx(
        TRUE.seconds(flops=1e9, num_bytes=1e6, dtype="float32", kind="matmul"), rel=0.1
    )
    assert prices.collective_seconds("all_reduce", num_bytes=2**26, axis="tp") == pytest.approx(6.7e-3, rel=0.1)


def test_noise_makes_short_collectives_neither_too_fast_nor_too_slow() -> None:
    noise = random.Random(0)
    short = [call for call in calls_of(TRUE) if call.kind in COLLECTIVES and call.num_bytes < 1e4]
    ratios = []
    for _ in range(10):
        calls = [
            replace(call, seconds=call.seconds * noise.lognormvariate(0.0, 0.4)) if call.kind in COLLECTIVES else call
            for call in calls_of(TRUE)
        ]
        levels = fitted(calls).levels
        ratios += [predicted_seconds(levels, call) / call.seconds for call in short]
    assert math.prod(ratios) ** (1 / len(ratios)) == pytest.approx(1.0, abs=0.12)  # by the shortest: 0.86


def test_a_fitted_cluster_is_the_same_behind_its_file(tmp_path: Path) -> None:
    cluster = fitted(calls_of(TRUE))
    path = tmp_path / "measured.toml"
    path.write_text(as_toml(cluster), encoding="utf-8")
    again = Cluster.from_toml(path)
    assert again.profile is not None and cluster.profile is not None
    assert again.profile.ranges.keys() == cluster.profile.ranges.keys()
    assert again.device.memory_bandwidth == pytest.approx(cluster.device.memory_bandwidth, rel=1e-5)
    assert Cluster.from_dict(again.to_dict()) == again


def test_the_file_of_one_device_says_nothing_of_links(tmp_path: Path) -> None:
    cluster = Cluster(
        "alone",
        (replace(fitted(calls_of(TRUE)).groups[0], count=1),),
        (LinkLevel("none", 1, latency=0.0, bandwidth=1.0),),
    )
    path = tmp_path / "alone.toml"
    path.write_text(as_toml(cluster), encoding="utf-8")
    assert "[[levels]]" not in path.read_text(encoding="utf-8")
    again = Cluster.from_toml(path)
    assert again.num_devices == 1 and again.device.name == cluster.device.name
    assert Cluster.from_dict(again.to_dict()) == again


def test_levels_are_left_out_only_of_one_device() -> None:
    data = Cluster.parse("cpu-local:1").to_dict()
    del data["levels"]
    with pytest.raises(ValueError, match="levels"):
        Cluster.from_dict(data)


@pytest.mark.parametrize("slope", [-0.5, 0.0, 0.4, 3.0])
def test_any_points_give_a_curve_that_a_device_can_have(slope: float) -> None:
    points = [(10.0**power, min(1.0, 0.3 * 2 ** (slope * (power - 6)))) for power in range(3, 10)]
    curve = fit_curve(points)
    assert all(0 < share <= 1 for _, share in curve.points)
    if slope in (0.0, 0.4):
        assert [curve(size) for size, _ in points] == pytest.approx([share for _, share in points], rel=0.1)


def test_what_lies_beyond_the_measured_sizes_is_told() -> None:
    cluster = fitted(calls_of(TRUE))
    assert cluster.profile is not None
    prices = CostModel(cluster, {"dp": 8})
    prices.extrapolation = Extrapolation(cluster.profile)
    most = cluster.profile.ranges["matmul"].most
    prices.compute_seconds(flops=most, num_bytes=1.0, dtype="float32")
    assert not prices.extrapolation.furthest
    prices.compute_seconds(flops=3 * most, num_bytes=1.0, dtype="float32")
    prices.collective_seconds("all_reduce", num_bytes=2.0**30, axis="dp")
    beyond = {name: factor for name, (_, factor) in prices.extrapolation.furthest.items()}
    assert beyond == pytest.approx({"matmul": 3.0, "host: all_reduce": 16.0})


def test_ranks_of_predictions_and_measurements_are_compared() -> None:
    assert spearman([1.0, 2.0, 3.0, 4.0], [0.1, 0.2, 0.4, 0.3]) == pytest.approx(0.8)
    assert spearman([1.0, 2.0, 2.0, 4.0], [0.1, 0.2, 0.3, 0.4]) == pytest.approx(0.9**0.5)


def test_groups_use_one_level_of_links_each_and_one_group_all() -> None:
    network = LinkGroups(NETWORK, 2, 4)
    alone = replace(network, place=ALONE, is_alone=True)
    assert link_groups(8, 4) == [
        LinkGroups(HOST, 2, 1),
        LinkGroups(HOST, 4, 1),
        alone,
        LinkGroups(ACROSS, 8, 1),
        network,
    ]
    assert link_groups(4, 1) == [LinkGroups(NETWORK, 2, 1), LinkGroups(NETWORK, 4, 1)]
    assert network.members(8) == [[0, 4], [1, 5], [2, 6], [3, 7]] and alone.members(8) == [[0, 4]]
    assert [groups.size for groups in link_groups(6, 6)] == [2, 6]
    assert set(COLLECTIVES) - set(LinkGroups(ACROSS, 8, 1).collectives) == {"send_recv"}
    assert network.collectives == tuple(COLLECTIVES)
    assert all(whole_elements(size, 6) % 36 == 0 and 4 * whole_elements(size, 6) >= size for size in SIZES)


def test_calls_of_an_earlier_run_are_taken_up_on_the_same_machine_only(tmp_path: Path) -> None:
    table, calls = tmp_path / "calls.csv", calls_of(TRUE)[:5]
    write_calls(table, "here", calls)
    assert read_calls(table, "here") == calls
    assert read_calls(table, "another machine") == read_calls(tmp_path / "none.csv", "here") == []
    first = table.read_text(encoding="utf-8").splitlines()[0]
    table.write_text("# here\nkind,place\nmatmul\n", encoding="utf-8")
    assert read_calls(table, "here") == []  # timed otherwise, by an earlier version
    table.write_text(f"{first}\nkind,place\nmatmul\n", encoding="utf-8")
    with pytest.raises(ValueError, match="damaged"):
        read_calls(table, "here")
    with pytest.raises(ValueError, match=r"is named \*\.toml"):
        profile_machine(tmp_path / "cluster.json")


def test_a_machine_is_measured_and_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each kind only the least work; the second run measures nothing."""
    smallest: dict[str, list[OperatorCase]] = {}
    for case in operator_cases():
        smallest.setdefault(case.kind, []).append(case)
    few = [case for cases in smallest.values() for case in cases[:6]]
    monkeypatch.setattr(measure_machine, "operator_cases", lambda: iter(few))
    monkeypatch.setattr(measure_machine, "PEAK_SIDES", (16, 32))
    path, told = tmp_path / "here.toml", list[str]()
    profile_machine(path, device="cpu", listener=told.append)
    assert sum(line.startswith("matmul float32 ") for line in told) == 6
    assert main(["profile", "--device", "cpu", "-o", str(path)]) == 0
    assert " µs" not in capsys.readouterr().out
    cluster = Cluster.from_toml(path)
    plan = planner.plan("tiny-llama", cluster, seq_len=8, global_batch=2)
    assert plan.step.interval is not None and plan.cluster["profile"]["machine"].startswith(
        "1 × " + cluster.device.name
    )


def test_ranks_measure_their_links_together(tmp_path: Path) -> None:
    """One of two ranks is slower: both make the same number of calls."""
    ranges = run_on_ranks("profile_worker", 2, {"path": str(tmp_path / "two.toml")})
    cluster = Cluster.from_toml(tmp_path / "two.toml")
    assert cluster.num_devices == 2 and [level.name for level in cluster.levels] == ["host"]
    assert all(math.isfinite(each) for each in ranges.values())


def test_calls_take_turns_with_tensors_that_no_cache_holds() -> None:
    copies, taken = itertools.count(), list[int]()
    call = cold(lambda: functools.partial(taken.append, next(copies)), 16 * 2**20)
    for _ in range(6):
        call()
    assert taken == [0, 1, 2, 3, 0, 1]


def test_results_stay_until_their_tensors_have_had_a_turn() -> None:
    """Else the next call would write into the memory of the one before, which a cache holds."""
    results = weakref.WeakSet[torch.Tensor]()

    def note() -> torch.Tensor:
        result = torch.empty(1)
        results.add(result)
        return result

    call = cold(lambda: note, 16 * 2**20)
    for _ in range(6):
        call()
    assert len(results) == 4


def test_a_collective_costs_its_mean_behind_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call in four waits for a processor: a median would not see it."""
    clock, calls = [0.0], itertools.count()
    monkeypatch.setattr(call_timing.time, "perf_counter", lambda: clock[0])

    def collective() -> None:
        clock[0] += 5.0 if next(calls) % 4 == 0 else 1.0

    seconds = seconds_behind_compute(collective, torch.device("cpu"), agree=lambda seconds: seconds)
    assert seconds == pytest.approx(2.0, abs=0.4)


def test_a_collective_is_what_chains_of_the_slowest_rank_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products take another rank 3 s more: it does not wait for itself."""
    clock, others, asked = [0.0], [0.0], []
    monkeypatch.setattr(call_timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(call_timing.torch, "mm", lambda left, right: clock.__setitem__(0, clock[0] + 1.0))

    def collective() -> None:
        clock[0] += 3.0 * call_timing.NUM_PRODUCTS + 2.0  # until the slower rank has come

    def agree(seconds: float) -> float:
        asked.append(seconds)
        return max(seconds, others[0] if seconds == call_timing.CHAIN * call_timing.NUM_PRODUCTS else 0.0)

    others[0] = call_timing.CHAIN * 4.0 * call_timing.NUM_PRODUCTS
    assert seconds_behind_compute(collective, torch.device("cpu"), agree=agree) == pytest.approx(2.0)
    assert len(asked) >= 1 + 4 * call_timing.CHAINS


def test_a_message_takes_half_of_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(call_timing.time, "perf_counter", lambda: clock[0])

    def there_and_back() -> None:
        clock[0] += 3.0

    seconds = seconds_one_way(there_and_back, torch.device("cpu"), agree=lambda seconds: seconds)
    assert seconds == pytest.approx(1.5)


def two_hosts(*, shared_by: int, algorithm: str, hop: float = 0.0) -> tuple[LinkLevel, ...]:
    """Two hosts of two ranks whose collectives take 0.1 ms in a host, 1 ms between, ``hop`` a step."""

    def protocols(latency: float) -> tuple[Protocol, ...]:
        return tuple(
            Protocol(
                each, latency, hop * (algorithm in ALGORITHMS[each]), collectives=(each,),
                algorithms=(algorithm,) * (algorithm in ALGORITHMS[each]),
            )
            for each in COLLECTIVES
        )  # fmt: skip

    inside = LinkLevel(HOST, 2, latency=1e-4, bandwidth=1e9, protocols=protocols(1e-4))
    between = LinkLevel(NETWORK, 4, latency=1e-3, bandwidth=1e8, shared_by=shared_by, protocols=protocols(1e-3))
    return inside, between


def calls_over(levels: tuple[LinkLevel, ...]) -> list[MeasuredCall]:
    """What timing would give over two hosts; of one rank of each alone as if no rank shared its link."""
    unshared = tuple(replace(level, shared_by=1) for level in levels)
    calls = []
    for groups, collective in itertools.product(link_groups(4, 2), COLLECTIVES):
        spans = route(unshared if groups.is_alone else levels, stride=groups.stride, size=groups.size)
        for size in groups.sizes:
            seconds = seconds_over(collective, num_bytes=size, spans=spans)
            place = groups.place
            calls.append(MeasuredCall(collective, place, str(size), 0.0, float(size), groups.size, seconds))
    return calls


@pytest.mark.parametrize("shared_by", [1, 2])
@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
@pytest.mark.parametrize("hop", [0.0, 5e-5])
def test_hosts_give_back_shared_links_algorithms_and_hops(shared_by: int, algorithm: str, hop: float) -> None:
    truth = two_hosts(shared_by=shared_by, algorithm=algorithm, hop=hop)
    calls = calls_over(truth)
    levels = fit_levels(calls, world_size=4, per_host=2)
    assert [level.shared_by for level in levels] == [1, shared_by]
    assert levels[1].bandwidth == pytest.approx(1e8, rel=0.05)  # the largest call takes 0.1 to 1% of latency
    ratios = [predicted_seconds(levels, call) / call.seconds for call in calls if call.place != ALONE]
    # curves have two points for sizes ten times apart, and one share of latencies is the steps' on both levels
    assert all(0.8 < ratio < 1.25 for ratio in ratios)
    assert math.prod(ratios) ** (1 / len(ratios)) == pytest.approx(1.0, abs=0.03)
    large = {
        each: next(c for c in calls if (c.kind, c.place) == (each, ACROSS) and c.num_bytes == 2**24)
        for each in COLLECTIVES
    }
    assert predicted_seconds(levels, large["all_reduce"]) == pytest.approx(large["all_reduce"].seconds, rel=0.03)


def test_a_rank_alone_sends_over_the_whole_link_that_it_shares() -> None:
    """A pipeline of four crosses the network once, whose link both ranks of a host share."""
    levels = fit_levels(calls_over(two_hosts(shared_by=2, algorithm="ring")), world_size=4, per_host=2)
    stages, pairs = (route(levels, stride=stride, size=size) for stride, size in ((1, 4), (2, 2)))
    alone, both = (seconds_over("send_recv", num_bytes=2**26, spans=spans) for spans in (stages, pairs))
    assert alone == pytest.approx(2**26 / 1e8, rel=0.05) and both == pytest.approx(2 * alone, rel=0.05)
