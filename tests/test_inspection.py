"""Saved plans looked at without their models: what is shown are the plan's own numbers."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import planner
from cost_models import Cluster
from passes.plan import Plan
from passes.plan.step_plan import Alternative
from passes.plan.step_summary import seq_len_of
from passes.plan.text_tables import format_bytes
from planner.cli import main
from planner.inspection.baseline_comparison import ComparedLayout
from planner.inspection.emitted_source import emitted_sources
from planner.inspection.html_report.assumption_table import assumption_rows
from planner.inspection.html_report.cluster_section import cluster_section, devices_together, groups_of
from planner.inspection.html_report.report_page import report_page
from planner.inspection.memory_curves import memory_curves
from planner.inspection.plan_difference import difference
from planner.inspection.robustness import BreakEven
from planner.inspection.running_cost import cost_lines, running_cost
from planner.inspection.simulated_step import simulated_step
from planner.inspection.step_trace import trace_events
from planner.inspection.time_waterfall import busiest_rank, waterfall
from planner.inspection.why_not import why_not
from planner.inspection.wishes import JoinedDemands, joined_demands
from planner.whole_step.candidates.no_plan import NoPlan
from tests.small_models import Mlp, mlp_batch, squared_error

pytestmark = pytest.mark.usefixtures("models_traced_once")

PIPELINE = {"pp": 2, "dp": 2, "tp": 1, "cp": 1, "num_microbatches": 4}
PLANS: Mapping[str, Mapping[str, Any]] = {
    "mesh": {"mesh": "dp=2,tp=2"},
    "1f1b": {"fix": {**PIPELINE, "schedule": "1f1b", "zero": 2, "recompute": "full"}},
    "zb_h1": {"fix": {**PIPELINE, "schedule": "zb_h1", "zero": 1}},
    "zbv": {"fix": {**PIPELINE, "num_microbatches": 8, "schedule": "zbv"}},
    "zero 3": {"fix": {"pp": 1, "dp": 4, "cp": 1, "tp": 1, "zero": 3}},
}
CALL: Mapping[str, Any] = {"example_inputs": mlp_batch(batch=16), "loss_fn": squared_error}


@cache
def plan_of(kind: str) -> Plan:
    """As a file has it."""
    cluster = Cluster.uniform(4, flops=1e9, memory_bandwidth=1e9, latency=1e-6, bandwidth=1e9, memory_bytes=2**30)
    model = Mlp(layers=4)
    plan = planner.plan(model, cluster, **CALL, **PLANS[kind])
    return Plan.from_dict(json.loads(plan.to_json()))


@pytest.mark.parametrize("kind", PLANS)
def test_a_saved_plan_plays_in_the_seconds_that_it_states(kind: str) -> None:
    plan = plan_of(kind)
    assert simulated_step(plan).seconds == pytest.approx(plan.step.costs.simulated, rel=1e-9)


@pytest.mark.parametrize("kind", PLANS)
def test_the_waterfall_adds_up_to_the_step(kind: str) -> None:
    plan = plan_of(kind)
    report = simulated_step(plan)
    bars = waterfall(plan, report)
    assert sum(bar.seconds for bar in bars) == pytest.approx(report.seconds, rel=1e-6)
    assert bars[0].seconds == pytest.approx(plan.step.costs.flops / (4 * 1e9), rel=1e-6)
    assert all(bar.seconds >= -1e-6 * report.seconds for bar in bars)


def bars_of(kind: str) -> dict[str, float]:
    return {bar.name: bar.seconds for bar in waterfall(plan_of(kind), simulated_step(plan_of(kind)))}


def test_what_is_recomputed_is_in_the_waterfall() -> None:
    seconds = {kind: bars_of(kind) for kind in PLANS}
    assert seconds["1f1b"]["computed again for the backward pass"] > 0.0
    assert seconds["zb_h1"]["waiting for other stages"] < seconds["1f1b"]["waiting for other stages"]
    assert seconds["zero 3"]["waiting for other stages"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("kind", PLANS)
def test_memory_over_time_peaks_where_the_plan_says(kind: str) -> None:
    plan = plan_of(kind)
    for curve, planned in zip(memory_curves(plan, simulated_step(plan)), plan.step.memory, strict=True):
        assert curve.peak_bytes == pytest.approx(planned.total, rel=1e-6)
        for part in ("parameters", "gradients", "optimizer"):
            assert set(curve.parts[part]) == {getattr(planned, part)}
        assert curve.parts["activations"][-1] == 0.0 or plan.step.costs.update == 0.0


@pytest.mark.parametrize("kind", PLANS)
def test_a_trace_has_every_second_that_ranks_compute(kind: str) -> None:
    plan = plan_of(kind)
    report = simulated_step(plan)
    events = [event for event in trace_events(plan, report) if event["ph"] == "X"]
    for rank, played in enumerate(report.ranks):
        computed = [event["dur"] for event in events if (event["pid"], event["cat"]) == (rank, "compute")]
        assert sum(computed) * 1e-6 == pytest.approx(played.compute_seconds, rel=1e-6)
    assert max(event["ts"] + event["dur"] for event in events) * 1e-6 == pytest.approx(report.seconds, rel=1e-6)


def test_a_step_that_plays_otherwise_than_it_states_is_refused() -> None:
    plan = plan_of("1f1b")
    costs = dataclasses.replace(plan.step.costs, simulated=0.9 * plan.step.costs.simulated)
    with pytest.raises(ValueError, match=r"states a simulated step of .* its units play in"):
        simulated_step(dataclasses.replace(plan, step=dataclasses.replace(plan.step, costs=costs)))


def test_parts_that_are_not_what_their_unit_takes_are_refused() -> None:
    saved = json.loads(plan_of("1f1b").to_json())
    saved["step"]["chunks"][1]["parts"][0]["compute_backward"] += 5.0
    with pytest.raises(ValueError, match=r"step.chunks\[1\]: unit 0 takes \S+ s backward, its parts \S+ s"):
        simulated_step(Plan.from_dict(saved))


@pytest.mark.parametrize("number", [-1.0, math.inf])
@pytest.mark.parametrize("name", ["costs.seconds", "costs.simulated", "costs.utilisation", "memory[0].activations"])
def test_a_prediction_below_zero_or_without_end_is_refused(name: str, number: float) -> None:
    saved = json.loads(plan_of("1f1b").to_json())
    row, _, field = name.partition(".")
    {"costs": saved["step"]["costs"], "memory[0]": saved["step"]["memory"][0]}[row][field] = number
    with pytest.raises(ValueError, match=rf"step\.{re.escape(name)}: expected a finite number of 0 or more, got "):
        Plan.from_dict(saved)


def test_speech_was_planned_for_as_many_tokens_as_it_has_labels() -> None:
    """Sound is longer than its text, and its graph can only be made again by what was asked for."""
    plan = plan_of("mesh")
    (tensor, *_) = plan.inputs.values()
    waves = dataclasses.replace(tensor, shape=(16, 5136), dtype="float32")
    labels = dataclasses.replace(tensor, shape=(16, 64), dtype="int64")
    assert seq_len_of(dataclasses.replace(plan, inputs={"input_values": waves, "labels": labels})) == 64
    assert seq_len_of(dataclasses.replace(plan, inputs={"pixel_values": waves})) is None


def test_a_plan_differs_from_itself_in_nothing() -> None:
    same = difference(plan_of("1f1b"), plan_of("1f1b"))
    assert same.same and "choose the same" in same.table()
    assert {change for _, _, _, change in same.figures} <= {"+0.00%", ""}


def test_what_differs_between_plans_is_told() -> None:
    changes = difference(plan_of("1f1b"), plan_of("zb_h1"))
    choices = {name: (first, second) for name, first, second in changes.choices}
    assert choices["schedule"] == ("1f1b", "zb_h1")
    assert choices["recompute"] == ("full", "none") and choices["ZeRO"] == ("2", "1")
    assert "pp" not in choices
    figures = {name: change for name, _, _, change in changes.figures}
    ours, theirs = plan_of("1f1b").step.costs, plan_of("zb_h1").step.costs
    assert figures["step, simulated"] == f"{theirs.simulated / ours.simulated - 1:+.2%}"


@pytest.mark.parametrize("kind", PLANS)
def test_a_report_is_one_file_that_names_no_other(kind: str) -> None:
    page = report_page(plan_of(kind), device_hour_price=2.0)
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=", page)
    for section in ("time", "pipeline", "memory", "cluster", "collectives", "model", "others", "assumptions"):
        assert f'<section id="{section}"' in page
    assert "Cost per million samples" in page and len(page) < 5_000_000


def test_a_step_that_takes_no_time_has_a_report_and_a_price() -> None:
    """Devices and links of closed forms may cost nothing."""
    free = Cluster.uniform(4, latency=0.0, bandwidth=float("inf"))
    plan = planner.plan(Mlp(layers=4), free, **CALL)
    assert plan.step.costs.simulated == 0.0
    runner_up = Alternative("pp=2", 0.0, 0.0, 1.0)
    plan = dataclasses.replace(plan, step=dataclasses.replace(plan.step, alternatives=(runner_up,)))
    assert "+0.00%" in report_page(plan)
    assert "0 days" in list(cost_lines(plan, device_hour_price=1.0, total=100))[1]


def test_days_and_money_keep_three_digits_however_little_they_are() -> None:
    plan = plan_of("1f1b")
    seconds = 100 / running_cost(plan, 1.0).rate
    priced, total = cost_lines(plan, device_hour_price=1e-3, total=100)
    assert "0.096 a day" in priced
    assert f"take {seconds / 86400:.3g} days" in total and f"cost {seconds / 3600 * 4e-3:.4g}" in total


def test_names_in_a_report_are_text() -> None:
    page = report_page(
        dataclasses.replace(plan_of("mesh"), model="<img src=x onerror=alert(1)>"), source="</pre><script>"
    )
    assert "<img" not in page and "</pre><script>" not in page


def test_what_the_model_is_needed_for_stands_in_the_report() -> None:
    plan = plan_of("1f1b")
    sources = emitted_sources(plan, Mlp(layers=4), **CALL)
    assert [name.split(",")[0] for name in sources][:2] == ["Chunk 1 of 2", "Chunk 2 of 2"]
    assert "layers.{0..1}" in sources["Chunk 1 of 2, on pipeline rank 0"]
    page = report_page(
        plan,
        source=sources,
        break_evens=[BreakEven("memory of a device", True, 1.5, "pp=1 × dp=4"), BreakEven("arithmetic", False, None)],
        layouts=[ComparedLayout("megatron", 2 * plan.step.costs.simulated, 2**30, "pp=2"),
                 ComparedLayout("alpa", None, 0.0, "nothing fits")],
    )  # fmt: skip
    for text in ("Chunk 2 of 2", "× 1.5", "none up to × 0.25", "+100.00%", "nothing fits"):
        assert text in page


def test_a_square_of_the_cluster_stands_for_neighbours_of_one_stage() -> None:
    assert devices_together(512, {"pp": 4, "dp": 128}) == 1
    assert devices_together(16_384, {"pp": 16, "dp": 128, "tp": 8}) == 32
    assert devices_together(3 * 1024, {"pp": 3, "dp": 1024}) == 8  # six do not divide the devices of a stage
    assert devices_together(1024, {"dp": 64, "pp": 16}) == 1  # neighbours are of other stages


def test_the_cost_per_million_is_devices_times_price_over_throughput() -> None:
    plan = plan_of("1f1b")
    cost = 4 * 2.0 / 3600.0 / plan.step.costs.samples_per_second * 1e6
    assert f"{cost:,.4g}" in report_page(plan, device_hour_price=2.0)


def test_the_busiest_rank_is_the_one_that_computes_longest() -> None:
    report = simulated_step(plan_of("1f1b"))
    assert report.ranks[busiest_rank(report)].compute_seconds == max(rank.compute_seconds for rank in report.ranks)


def test_the_command_line_writes_reports_and_traces_and_prints_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    plan_of("1f1b").save(first)
    plan_of("zb_h1").save(second)
    assert main(["report", str(first), "-o", str(tmp_path / "a.html"), "--price", "2"]) == 0
    assert main(["trace", str(first), "-o", str(tmp_path / "trace.json")]) == 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    capsys.readouterr()
    assert main(["diff", str(first), str(second)]) == 0
    assert "schedule" in capsys.readouterr().out
    assert main(["show", str(first), "--price", "2", "--tokens", "1000000"]) == 0
    seconds_of_sample = plan_of("1f1b").step.costs.simulated / 16
    text = " ".join(capsys.readouterr().out.split())
    assert f"{4 * 2 / 3600 * seconds_of_sample * 1e6:,.4g} per million samples, 192 a day" in text
    assert f"1,000,000 samples take {1e6 * seconds_of_sample / 86400:.3g} days" in text
    assert main(["report", str(first), "-o", str(tmp_path / "missing" / "a.html")]) == 2
    assert main(["report", str(first), "-o", str(tmp_path / "a.html"), "--source", str(tmp_path / "none.py")]) == 2


def test_a_wish_is_searched_again_and_costs_what_its_plan_takes_more() -> None:
    plan = plan_of("1f1b")
    answer = why_not(plan, fix={"schedule": "gpipe"}, model=Mlp(layers=4), **CALL)
    assert answer.wished is not None and answer.wished.step.schedule == "gpipe"
    assert answer.wished.step.zero == plan.step.zero and answer.wished.step.axes["pp"] == 2
    change = answer.wished.step.costs.simulated / plan.step.costs.simulated - 1
    assert f"{change:+.2%}" in answer.table() and "gpipe" in answer.table()
    half = {**CALL, "example_inputs": mlp_batch(batch=8)}
    answer = why_not(plan, fix={"num_microbatches": 2}, global_batch=8, model=Mlp(layers=4), **half)
    assert answer.wished is not None and answer.wished.step.global_batch == 8
    rates = [each.step.costs.samples_per_second for each in (plan, answer.wished)]
    assert f"({rates[1] / rates[0] - 1:+.2%})" in answer.table()


def test_a_wish_replaces_the_plans_own_demands_that_contradict_it() -> None:
    plan = plan_of("1f1b")
    assert plan.certificate.demands["fix"]["schedule"] == ["1f1b"]
    answer = why_not(plan, forbid={"schedule": "1f1b"}, model=Mlp(layers=4), **CALL)
    assert answer.wished is not None and answer.wished.step.schedule != "1f1b"
    assert "Left out of the plan's own demands, for the wish: fix schedule=1f1b" in answer.table()


@pytest.mark.parametrize(
    ("own", "fix", "forbid", "joined"),
    [
        ({"fix": {"tp": [2]}}, {"tp": 4}, {}, ({"tp": 4}, {}, ("fix tp=2",))),
        ({"fix": {"tp": [2], "zero": [1]}}, {"dp": 4}, {}, ({"zero": [1], "dp": 4}, {}, ("fix tp=2",))),
        ({"fix": {"tp": [2]}}, {"dp": 2}, {}, ({"tp": [2], "dp": 2}, {}, ())),
        ({"fix": {"zero": [1]}}, {}, {"zero": 1}, ({}, {"zero": [1]}, ("fix zero=1",))),
        ({"fix": {"zero": [1, 2]}}, {}, {"zero": 1}, ({"zero": [1, 2]}, {"zero": [1]}, ())),
        ({"forbid": {"zero": [2, 3]}}, {"zero": 3}, {}, ({"zero": 3}, {"zero": [2]}, ("forbid zero=3",))),
        ({"forbid": {"zero": [2]}}, {}, {"zero": 3}, ({}, {"zero": [2, 3]}, ())),
    ],
)
def test_demands_that_a_wish_leaves_of_a_plan_on_4_devices(
    own: dict[str, Any], fix: dict[str, Any], forbid: dict[str, Any], joined: tuple[Any, ...]
) -> None:
    assert joined_demands(own, fix=fix, forbid=forbid, num_devices=4) == JoinedDemands(*joined)


def test_a_wish_cannot_be_only_where_that_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("1f1b")
    answer = why_not(plan, fix={"dp": 3}, model=Mlp(layers=4), **CALL)
    assert answer.wished is None and answer.reason.startswith("It cannot be: dp=3 cannot be met")

    def out_of_time(*arguments: Any, **options: Any) -> Plan:
        raise NoPlan("no plan was found within time_limit = 1 s", proved=False)

    monkeypatch.setattr("planner.planning.plan", out_of_time)
    with pytest.raises(NoPlan, match="within time_limit"):
        why_not(plan, fix={"dp": 2}, model=Mlp(layers=4), **CALL)


@pytest.mark.parametrize(
    "kind, options, message",
    [
        ("1f1b", {}, "no wish"),
        ("mesh", {"fix": {"tp": 4}}, "on a given mesh"),
        ("1f1b", {"fix": {"tp": 4}}, "does not name a config"),
        ("1f1b", {"seq_len": 32}, "seq_len is of models"),
        ("1f1b", {"fix": {"no such": 4}}, "unknown name"),
        ("1f1b", {"memory_limit": 2**31}, "a bound of 2 GiB is more than the 1 GiB that devices of uniform have"),
        ("1f1b", {"fix": {"schedule": "gpipe"}, "model": Mlp(layers=5), **CALL}, "is another than"),
    ],
)
def test_a_wish_that_cannot_be_asked_is_refused(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        why_not(plan_of(kind), **options)


def test_experts_layouts_stand_beside_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """What a plan beats is priced by the same models; what a cluster has no place for is said so."""
    request = ["plan", "tiny-llama", "--cluster", "dgx-h100:1", "--seq-len", "16", "--global-batch", "8"]
    assert main([*request, "--compare", "megatron,fsdp,hsdp"]) == 0
    table = capsys.readouterr().out.partition("Other layouts")[2]
    rows = {
        name: next(line for line in table.splitlines() if line.strip().startswith(name))
        for name in ("megatron", "fsdp")
    }
    assert "hsdp: no data axis crosses a level of links" in " ".join(table.split())
    assert all(re.search(r"\+\d+\.\d\d%", rows[name]) for name in ("megatron", "fsdp"))
    assert main([*request, "--compare", "no such"]) == 2
    assert main([*request, "--mesh", "dp=8", "--compare", "fsdp"]) == 2


def test_the_links_load_counts_groups_of_several_axes_and_of_some_data_ranks() -> None:
    """Gradients of a context axis are reduced over dp and cp together, hybrid sharding has two groups of data ranks."""
    request: dict[str, Any] = {"global_batch": 16, "seq_len": 64}
    joint = {"dp": 2, "cp": 4, "tp": 1, "zero": 0}
    plans = [
        planner.plan("tiny-llama", "dgx-h100:1", fix=fix, **request)
        for fix in (joint, {"dp": 8, "zero": 3, "zero_ranks": 4})
    ]
    groups = [{group.name: (group.size, group.stride) for group in groups_of(plan)} for plan in plans]
    assert groups[0] == {"dp": (2, 4), "cp": (4, 1), "dp_cp": (8, 1)}
    assert groups[1] == {"dp": (8, 1), "dp_shard": (4, 1), "dp_replicate": (2, 4)}
    for plan in plans:
        rows = {row[0]: row[4] for row in cluster_section(plan).rows}
        sums = Counter[str]()
        for item in plan.collectives:
            sums[item.axis] += item.num_bytes
        assert {axis: format_bytes(size) for axis, size in sums.items()}.items() <= rows.items()
    picture = cluster_section(plans[0]).chart
    assert (picture.yaxis[0].ticker.ticks, picture.xaxis[0].ticker.ticks[-1]) == ([0.5], 7.5)  # one node of eight


def test_assumptions_name_the_sources_of_a_preset() -> None:
    """Unless the cluster's figures are no longer the preset's."""
    data = Cluster.parse("dgx-h100:4").to_dict()
    slower = Cluster.parse("dgx-h100:4").to_dict()
    slower["levels"][1]["bandwidth"] /= 2
    sources = [
        {row[0]: row[2] for row in assumption_rows(dataclasses.replace(plan_of("1f1b"), cluster=cluster))}
        for cluster in (data, slower)
    ]
    assert sources[0]["peak, bfloat16"].startswith('"NVIDIA H100 Tensor Core GPU" data sheet')
    assert "benchmarks/published_runs/ (Megatron, MosaicML, Llama-3)" in sources[0]["efficiency, matmul"]
    assert "FlashAttention-3" in sources[0]["efficiency, attention"]
    assert "DGX H100 data sheet" in sources[0]["network: bandwidth"]
    assert "tuning.cc" in sources[0]["nvlink: latency"]
    assert sources[1]["network: bandwidth"].endswith("(not as the preset of that name has it)")
    assert sources[1]["nvlink: bandwidth"] == sources[0]["nvlink: bandwidth"]
