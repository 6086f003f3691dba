"""Published training runs: predicted speed and memory against what was measured, one set of curves a device."""

from __future__ import annotations

import functools

import pytest

from benchmarks.published import Comparison, PublishedRun, compare, published_runs, recomputed_flops
from planner.library import load_config

RUNS = {run.name: run for run in published_runs()}
#: What was asked of predictions: within 15% of the measurement.
TOLERANCE = 0.15
#: Runs that no curve was set by, and how near they come.
UNSEEN = {
    "titan 405B, tp=8 on 128": 0.10,
    "Megatron 175B on 1,024": 0.10,
    "Megatron 1T on 512": 0.15,
    "titan 70B, tp=8 on 256": 0.10,
}


@functools.cache
def result_of(name: str) -> Comparison:
    return compare(RUNS[name])


@pytest.mark.parametrize("name", ["titan 8B on 8", "titan 8B on 128"])
def test_llama_8b_runs_as_fast_and_in_as_much_memory_as_published(name: str) -> None:
    result = result_of(name)
    assert result.speed_ratio == pytest.approx(1.0, abs=TOLERANCE)
    assert result.memory_ratio == pytest.approx(1.0, abs=TOLERANCE)


def test_llama_405b_on_16384_reaches_the_published_flops() -> None:
    """Of a plan that is within 5% of the best; the best, and 8,192: ``python -m benchmarks.published Llama-3``."""
    result = compare(RUNS["Llama-3-405B on 16,384"], gap=0.05)
    assert result.speed_ratio == pytest.approx(1.0, abs=TOLERANCE)


@pytest.mark.parametrize("name", UNSEEN)
def test_runs_that_no_curve_was_set_by(name: str) -> None:
    assert RUNS[name].use == "test"
    assert result_of(name).speed_ratio == pytest.approx(1.0, abs=UNSEEN[name])


def test_more_data_parallel_devices_need_less_memory() -> None:
    few, many = result_of("titan 8B on 8"), result_of("titan 8B on 128")
    published = RUNS["titan 8B on 8"].published["gib"] - RUNS["titan 8B on 128"].published["gib"]
    assert few.predicted_gib - many.predicted_gib == pytest.approx(published, rel=TOLERANCE)


def test_flops_with_recomputation_are_those_of_the_published_table() -> None:
    """Narayanan et al. 2021, table 1: 1,008 B parameters, batch 3,072, 3,072 devices of 163 TFLOP/s."""
    run = RUNS["Megatron 1T on 3,072"]
    seconds = recomputed_flops(run, load_config(run.model)) / (163e12 * 3072)
    assert run.global_batch * run.seq_len * 8 * 1008e9 / (163e12 * 3072) == pytest.approx(seconds, rel=0.03)


def test_runs_far_off_say_why() -> None:
    assert all(run.why for run in published_runs() if run.name.startswith(("OPT", "BLOOM")) or "eager" in run.name)


def test_every_run_says_what_it_was_used_for_and_what_was_measured() -> None:
    measures = {"tokens_per_second", "seconds", "tflops", "hardware_tflops", "gib"}
    assert len({run.name for run in published_runs()}) == len(published_runs())
    for run in published_runs():
        assert isinstance(run, PublishedRun)
        assert run.use in ("calibration", "test")
        assert run.published.keys() <= measures
        assert run.published
