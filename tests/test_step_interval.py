"""The interval of a predicted step: quantiles of published runs on such devices, in the plan, its file and texts."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import pytest

pytest.importorskip("transformers")

from cost_models import Cluster
from cost_models.measured_profile import SAME_CALL, MeasuredRange, Profile
from cost_models.memory import HEADROOM
from cost_models.memory_interval import FilledDevices, filled_devices, memory_interval
from cost_models.step_interval import published_residuals, step_interval
from passes.plan import Plan
from passes.plan.text_tables import format_bytes_between, format_seconds, format_seconds_between
from planner.inspection.html_report.headline import headline
from planner.library import load_config
from planner.planning import capture_for_planning
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.plan_step import plan_step


@functools.cache
def plan_on(preset: str) -> Plan:
    graph = capture_for_planning(load_config("tiny-llama"), batch_size=16, seq_len=32)
    return plan_step(
        graph, Cluster.parse(preset), read_demands({"tp": 1, "pp": 1, "cp": 1, "zero": 3, "recompute": "none"})
    )


def test_plan_on_h100s_prints_and_saves_its_interval() -> None:
    plan = plan_on("dgx-h100")
    residuals = published_residuals()["H100"]
    seconds = plan.step.costs.simulated
    assert plan.step.interval == (seconds * residuals.low, seconds * residuals.high)
    text = format_seconds_between(seconds, plan.step.interval)
    assert text in plan.summary() and text in plan.brief() and text.endswith(")")
    card = next(iter(headline(plan, device_hour_price=None)))
    assert card.figure == text and "nine of ten runs published" in card.remark
    assert Plan.from_dict(json.loads(plan.to_json())) == plan


def test_interval_is_in_the_unit_of_the_seconds() -> None:
    assert format_seconds_between(1.03, (0.96, 1.12)) == "1.03 s (0.96–1.12)"
    assert format_seconds_between(0.97, (0.9, 1.1)) == "970 ms (900–1100)"
    assert format_seconds_between(1.03, None) == "1.03 s"


def test_less_than_nothing_is_in_the_unit_of_its_size() -> None:
    assert [format_seconds(seconds) for seconds in (-0.0752, -2e-6, 0.0)] == ["-75.2 ms", "-2 µs", "0 s"]


def test_devices_without_published_runs_have_no_interval() -> None:
    assert step_interval(1.0, Cluster.parse("cpu-local:2").groups) is None
    mixed = (*Cluster.parse("dgx-h100").groups, *Cluster.parse("cpu-local:2").groups)
    assert step_interval(1.0, mixed) is None
    both = step_interval(2.0, (*Cluster.parse("dgx-h100").groups, *Cluster.parse("dgx-a100-80g").groups))
    a100, h100 = published_residuals()["A100"], published_residuals()["H100"]
    assert both == (2.0 * min(a100.low, h100.low), 2.0 * max(a100.high, h100.high))


def measured(spread: float, *, calls: int = 10) -> MeasuredRange:
    return MeasuredRange("flops", 1.0, 2.0, calls, 1 / spread, 1.0, spread)


def width(**ranges: MeasuredRange) -> float:
    """Logarithm of how many times as long as expected a measured step may take."""
    ends = step_interval(1.0, (), Profile("here", ranges))
    assert ends is not None
    return math.log(ends[1])


def test_interval_of_a_measured_machine_adds_what_does_not_depend_on_each_other() -> None:
    """Published runs alone; kinds of work average out; a machine whose speed changes does not."""
    chips = published_residuals().values()
    steps = sum(chip.runs * math.log(chip.high) for chip in chips) / sum(chip.runs for chip in chips)
    assert width(one=measured(1.0)) == pytest.approx(steps)
    one, two = width(one=measured(1.5)), width(one=measured(1.5), other=measured(1.5))
    assert one == pytest.approx(math.hypot(steps, math.log(1.5)))
    assert two == pytest.approx(math.hypot(steps, math.log(1.5) / 2, math.log(1.5) / 2))
    drifting = width(one=measured(1.5), **{SAME_CALL: measured(1.2, calls=40)})
    assert drifting == pytest.approx(math.hypot(one, math.log(1.2)))


def test_a_report_says_what_an_interval_is_made_of() -> None:
    plan = plan_on("dgx-h100")
    profiled = dataclasses.replace(plan, cluster={**plan.cluster, "profile": {"machine": "here", "ranges": {}}})
    card = next(iter(headline(profiled, device_hour_price=None)))
    assert "as the cluster was measured" in card.remark and "published" not in card.remark


@pytest.mark.parametrize("interval", [[2.0, 1.0], [-1.0, 1.0], [1.0, float("inf")]])
def test_files_with_impossible_intervals_are_refused(interval: list[float]) -> None:
    plan = plan_on("dgx-h100")
    data = json.loads(plan.to_json())
    data["step"]["interval"] = interval
    with pytest.raises(ValueError, match=r"step\.interval: expected two finite seconds in order"):
        Plan.from_dict(data)
    older = dataclasses.asdict(plan)
    del older["step"]["interval"]
    assert Plan.from_dict(json.loads(json.dumps(older))).step.interval is None


def test_memory_of_a_plan_on_h100s_has_the_interval_of_plans_that_filled_them() -> None:
    plan = plan_on("dgx-h100")
    low, high = filled_devices()["H100"].quantiles
    fullest = plan.step.memory[plan.step.fullest_rank].total
    assert plan.step.memory_interval == (fullest * low, fullest * high)
    assert 0.9 < low < 1.0 < high < 1.0 / (1.0 - HEADROOM)
    text = format_bytes_between(fullest, plan.step.memory_interval)
    assert f"fullest device {text}" in plan.brief() and f"full, {text} (most of it" in plan.summary()
    card = next(card for card in headline(plan, device_hour_price=None) if card.name == "Fullest device")
    assert card.figure == text and "nine of ten plans that filled such devices" in card.remark


def test_quantiles_leave_a_twentieth_of_the_runs_on_either_side() -> None:
    chip = FilledDevices((), tuple(1.0 + place / 100.0 for place in range(19)))
    assert chip.quantiles == pytest.approx((1.0, 1.18))


def test_devices_that_nobody_filled_have_no_interval_of_memory() -> None:
    assert plan_on("dgx-a100-80g").step.memory_interval is None
    assert "GiB (" not in plan_on("dgx-a100-80g").brief().split("fullest device")[1].splitlines()[0].split(" of ")[0]
    mixed = (*Cluster.parse("dgx-h100").groups, *Cluster.parse("dgx-a100-80g").groups)
    assert memory_interval(1.0, mixed) is None
    assert format_bytes_between(2.5 * 2**30, None) == "2.5 GiB"
    assert format_bytes_between(73.7 * 2**30, (71.3 * 2**30, 77.2 * 2**30)) == "73.7 GiB (71.3–77.2)"


@pytest.mark.parametrize("interval", [[2.0, 1.0], [-1.0, 1.0], [0.0, math.inf]])
def test_an_interval_of_memory_that_is_none_is_refused(interval: list[float]) -> None:
    table = json.loads(plan_on("dgx-h100").to_json())
    table["step"]["memory_interval"] = interval
    with pytest.raises(ValueError, match=r"step\.memory_interval"):
        Plan.from_dict(table)
