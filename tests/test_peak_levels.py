"""Fronts by level of peaks: the fastest choices are those of an enumeration, and few levels are worked out."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from cost_models.step import LayerCosts
from planner.pipeline_ilp.average_bounds import average_bounds
from planner.pipeline_ilp.fronts import LOAD
from planner.pipeline_ilp.peak_levels import PeakLevel, fastest_front, peak_levels
from planner.pipeline_ilp.posed_problem import PosedProblem
from planner.pipeline_ilp.rank_contents import _SIGNS, _undominated
from planner.pipeline_ilp.ranks import RankTable
from planner.pipeline_ilp.stage_bounds import time_bounds
from planner.pipeline_ilp.stage_problem import StageProblem, UnitChoice, UnitRun, folded
from tests.cells import cells
from tests.test_step_stages import Draw

#: Micro-batches in flight in chunks 0 and 1.
HELD = (2.0, 1.0)


def run_of(draw: random.Random, name: str, count: int) -> UnitRun:
    """A run whose slower choices take fewer bytes, with peaks of their own."""
    choices = [
        LayerCosts(
            forward=seconds,
            backward=2.0 * seconds,
            state_bytes=draw.uniform(0.0, 1.0),
            saved_bytes=8.0 / seconds,
            peak_bytes=draw.choice([0.0, 2.0, 5.0]),
        )
        for seconds in (1.0, 2.0, 4.0)
    ]
    return UnitRun(name=name, count=count, choices=tuple(UnitChoice(label=(name,), costs=each) for each in choices))


def enumerated(runs: tuple[UnitRun, ...], slots: list[tuple[int, int]], limit: float) -> float:
    """Least seconds of any choices within memory."""
    best = math.inf
    for chosen in itertools.product(*(runs[run].choices for _, run in slots)):
        costs = [choice.costs for choice in chosen]
        size = max(each.peak_bytes for each in costs)
        size += sum(each.state_bytes + HELD[chunk] * each.saved_bytes for each, (chunk, _) in zip(costs, slots))
        if size <= limit:
            best = min(best, sum(each.forward + each.backward for each in costs))
    return best


@pytest.mark.parametrize("seed", cells(range(20), range(20, 60)))
def test_the_fastest_front_has_the_fastest_choices_of_all(seed: int) -> None:
    draw = random.Random(seed)
    runs = (run_of(draw, "first", 1), run_of(draw, "long", 4))
    slots = [(0, 0), (0, 1), (0, 1), (1, 1)]
    limit = draw.uniform(10.0, 70.0)
    front = fastest_front(peak_levels(runs, slots, LOAD, held=HELD, limit=limit), slots)
    expected = enumerated(runs, slots, limit)
    assert (math.inf if front is None else front.seconds[0]) == pytest.approx(expected)
    problem = StageProblem(
        runs=runs, schedule="1f1b", num_ranks=2, num_chunks=2, num_microbatches=2, memory=(limit, limit)
    )
    table = RankTable(problem, 0, [0], 1, LOAD, received=0.5)
    held = [(0, 0), *[(0, 1)] * 3]
    assert table.load(3) == pytest.approx(enumerated(runs, held, limit) + 0.5)
    if math.isfinite(table.load(3)):
        chosen = [runs[run].choices[choice].costs for _, run, choice in table.assigned(3)]
        assert sum(each.forward + each.backward for each in chosen) + 0.5 == pytest.approx(table.load(3))


def test_levels_that_cannot_hold_the_fastest_are_not_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = (
        LayerCosts(forward=seconds, backward=seconds, saved_bytes=1.0, peak_bytes=peak)
        for seconds, peak in ((1.0, 4.0), (3.0, 0.0))
    )
    run = UnitRun(name="long", count=3, choices=tuple(UnitChoice(label=("",), costs=each) for each in (fast, slow)))
    slots, asked = [(0, 0)] * 3, []
    front_of = PeakLevel.front
    monkeypatch.setattr(PeakLevel, "front", lambda level, slots: asked.append(level) or front_of(level, slots))
    for limit, num_levels in ((100.0, 1), (8.0, 2)):
        asked.clear()
        levels = peak_levels((run,), slots, LOAD, held=HELD, limit=limit)
        front = fastest_front(levels, slots)
        assert len(levels) == 2 and len(asked) == num_levels
        assert front is not None and front.seconds[0] == pytest.approx(6.0 if limit > 50 else 18.0)


def test_rows_of_contents_are_those_that_no_other_beats_or_equals() -> None:
    table = np.random.default_rng(0).integers(0, 4, (60, 5)).astype(float)
    values = table * _SIGNS
    rows = _undominated(table)
    for place, row in enumerate(values):
        better = (values[rows] <= row).all(axis=1)
        assert better.any() and (place not in rows or better.sum() == 1)


def test_averages_bound_no_more_than_all_that_is_proved_at_once() -> None:
    for seed, schedule in itertools.product(range(6), ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zbv")):
        problem = Draw(seed).problem(schedule)
        average, bounds = average_bounds(folded(problem)), time_bounds(folded(problem))
        assert average.load <= bounds.load and average.step <= bounds.step
        posed = PosedProblem(problem)
        all_at_once = posed.quick_bound(math.inf)
        for cutoff in (0.5 * average.step, average.step, bounds.step, 2.0 * bounds.step):
            quick = posed.quick_bound(cutoff)
            assert quick <= all_at_once or quick <= cutoff * (1.0 + 1e-9)
            assert quick >= min(cutoff, average.step)
