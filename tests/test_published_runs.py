"""Published training runs: predicted speed and memory against what was measured, one set of curves a device."""

from __future__ import annotations

import functools

import pytest

from benchmarks.published_scores import (
    CHIPS,
    falls_behind,
    faster_pairs,
    ordered_by_distance,
    read_predictions,
    recent_medians,
    residual_quantiles,
    scoreboard_errors,
    speed_ratios,
)
from benchmarks.published_table import Comparison, PublishedRun, compare, published_runs, recomputed_flops
from cost_models.step_interval import published_residuals
from cost_models.told_apart import least_ordered, ordered_pairs
from planner.library import load_config

RUNS = {run.name: run for run in published_runs()}
#: What was asked of predictions: within 15% of the measurement.
TOLERANCE = 0.15
#: Runs of the test half, and how near predictions come.
UNSEEN = {
    "Megatron 175B on 768": 0.10,
    "Megatron 3.6B on 64": 0.15,
    "titan 70B, A100": 0.15,
    "MPT-1B on 8, A100": 0.15,
}
#: Published speeds: 38,983, 25,135 and 25,980 tokens/s.
FEW_DEVICES = ("Kempner 8B on 4, dp=4", "Kempner 8B on 4, tp=4", "Kempner 8B on 4, tp=2 x dp=2")
#: Small runs of both halves and families: their stored predictions must be today's.
PRICED_AGAIN = (*UNSEEN, "titan 8B on 8", "titan 8B on 128")


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
    assert RUNS[name].split == "test"
    assert result_of(name).speed_ratio == pytest.approx(1.0, abs=UNSEEN[name])


@pytest.mark.parametrize("name", FEW_DEVICES)
def test_tensor_and_data_parallelism_on_few_devices_come_within_a_tenth(name: str) -> None:
    """8B on 4 H200, recomputed in full: speed, and the bytes of tensors."""
    result = result_of(name)
    assert result.speed_ratio == pytest.approx(1.0, abs=0.1)
    assert result.memory_ratio == pytest.approx(1.0, abs=0.1)


def test_memory_is_within_a_tenth_wherever_a_run_states_it() -> None:
    ratios = [row["memory"] for row in read_predictions().values() if row["memory"] is not None]
    assert len(ratios) >= 37
    assert max(abs(ratio - 1.0) for ratio in ratios) <= 0.1


def test_more_data_parallel_devices_need_less_memory() -> None:
    few, many = result_of("titan 8B on 8"), result_of("titan 8B on 128")
    published = RUNS["titan 8B on 8"].published["gib"] - RUNS["titan 8B on 128"].published["gib"]
    assert few.predicted_gib - many.predicted_gib == pytest.approx(published, rel=TOLERANCE)


def test_flops_with_recomputation_are_those_of_the_published_table() -> None:
    """Narayanan et al. 2021, table 1: 1,008 B parameters, batch 3,072, 3,072 devices of 163 TFLOP/s."""
    run = RUNS["Megatron 1T on 3,072"]
    seconds = recomputed_flops(run, load_config(run.model)) / (163e12 * 3072)
    assert run.global_batch * run.seq_len * 8 * 1008e9 / (163e12 * 3072) == pytest.approx(seconds, rel=0.03)


def test_runs_whose_speed_or_memory_is_far_off_say_why() -> None:
    far = {
        name
        for name, row in read_predictions().items()
        for ratio in (row["speed"], row["memory"])
        if ratio is not None and not 1 / (1 + TOLERANCE) <= ratio <= 1 + TOLERANCE
    }
    assert [name for name in sorted(far) if not RUNS[name].why] == []


@pytest.mark.parametrize("name", PRICED_AGAIN)
def test_stored_predictions_are_those_of_today(name: str) -> None:
    """Else prices have changed: ``python -m benchmarks.published --write``, and say what became of the medians."""
    assert result_of(name).speed_ratio == pytest.approx(read_predictions()[name]["speed"], rel=0.01)


def test_no_change_makes_predictions_worse_or_loses_a_run() -> None:
    assert falls_behind(read_predictions()) == []


def test_scoreboard_names_the_family_that_became_worse_and_the_run_that_was_lost() -> None:
    stored = dict(read_predictions())
    del stored["titan 8B on 8"]
    (lost,) = falls_behind(stored)
    assert "'titan 8B on 8'" in lost
    slower = {
        name: {**row, "speed": None if row["speed"] is None else row["speed"] * 1.15}
        for name, row in read_predictions().items()
        if RUNS[name].family == "fully sharded"
    }
    sentences = falls_behind({**read_predictions(), **slower})
    assert [sentence.split(" runs")[0] for sentence in sentences] == [
        "the mean error of total",
        "the mean error of fully sharded",
    ]
    assert scoreboard_errors(read_predictions())["replicated"] > 0.0


def test_halves_are_decided_by_name_and_stay() -> None:
    halves = {"Megatron 145B on 1,536": "test", "MPT-7B, H100": "test", "FMS 34B on 128, A100": "calibration"}
    assert {name: RUNS[name].split for name in halves} == halves
    assert RUNS["Megatron 22B on 8"].split == "calibration"  # curves were set with a look at it
    assert len(RUNS) >= 120


def test_shipped_pairs_are_of_the_calibration_half_and_the_other_is_told_apart_as_well() -> None:
    calibration, test = (
        ordered_by_distance([run for run in published_runs() if run.split == half], read_predictions())
        for half in ("calibration", "test")
    )
    assert calibration == list(ordered_pairs())
    apart = [row for row in test if row.apart >= least_ordered(calibration)]
    assert sum(row.right for row in apart) / sum(row.pairs for row in apart) >= 0.9


def test_shipped_residuals_are_of_the_calibration_half_and_cover_the_other() -> None:
    quantiles = residual_quantiles(read_predictions())
    assert quantiles == published_residuals()
    test_half = [run for run in RUNS.values() if run.split == "test"]
    inside = [
        quantiles[run.device].low <= ratio <= quantiles[run.device].high
        for run in test_half
        for ratio in speed_ratios([run], read_predictions())
    ]
    assert 0.85 <= sum(inside) / len(inside) <= 0.95
    assert set(quantiles) == set(CHIPS)


def test_no_family_and_no_chip_is_predicted_faster_than_another() -> None:
    """Test runs with recent software: medians of families, and of chips, within 4% of each other."""
    medians = recent_medians(read_predictions())
    assert medians["fully sharded"] == pytest.approx(medians["tensor/pipeline"], rel=0.04)
    assert medians["A100"] == pytest.approx(medians["H100"], rel=0.04)


@pytest.mark.parametrize("half", ["calibration", "test"])
def test_the_faster_of_two_published_runs_is_predicted(half: str) -> None:
    right, total = faster_pairs([run for run in RUNS.values() if run.split == half], read_predictions())
    assert total >= 40
    assert right / total >= 0.9


def test_pairs_are_of_one_model_on_one_chip_and_apart() -> None:
    pair = [RUNS["MPT-70B on 64, A100"], RUNS["MPT-70B on 32, A100"]]
    speeds = {run.name: {"speed": 1.0, "tokens_per_second": 100.0} for run in pair}
    assert faster_pairs(pair, speeds) == (0, 0)
    first, second = (run.name for run in pair)
    assert faster_pairs(pair, {**speeds, first: {"speed": 0.5, "tokens_per_second": 100.0}}) == (0, 1)
    assert faster_pairs(pair, {**speeds, second: {"speed": 0.5, "tokens_per_second": 120.0}}) == (1, 1)
    assert faster_pairs([pair[0], RUNS["MPT-70B on 64, H100"]], read_predictions()) == (0, 0)


def test_every_run_says_what_it_was_used_for_and_what_was_measured() -> None:
    measures = {"tokens_per_second", "seconds", "tflops", "hardware_tflops", "gib", "allocated_gib"}
    assert len({run.name for run in published_runs()}) == len(published_runs())
    for run in published_runs():
        assert isinstance(run, PublishedRun)
        assert run.split in ("calibration", "test")
        assert run.published.keys() <= measures
        assert run.published
