"""What memory leaves to save is as large as any share of it among ranks makes it, and plans recompute no less."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.schedules import in_flight, rank_of_chunk
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.candidates import candidates
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.costs.candidate_bounds import Bounds, _fewest_in_flight
from planner.whole_step.costs.least_recompute import Savings, room_to_save
from tests.exhaustive_models import level_one

IN_FLIGHT = st.lists(st.integers(1, 12).map(lambda times: times / 2), min_size=1, max_size=6)


@given(held=IN_FLIGHT, filled=st.floats(0.0, 1.0), seed=st.integers(0, 2**16))
def test_no_share_of_state_among_ranks_leaves_more_room(held: list[float], filled: float, seed: int) -> None:
    memory, draw = 8.0, random.Random(seed)
    occupied = filled * memory * len(held)
    room, growth = room_to_save(held, memory, occupied)
    for _ in range(8):
        rest, shares = occupied, []
        for place in draw.sample(range(len(held)), len(held)):
            least = max(0.0, rest - memory * (len(held) - len(shares) - 1))
            shares.append(draw.uniform(least, min(rest, memory)))
            rest -= shares[-1]
            assert shares[-1] <= memory + 1e-9, place
        of_ranks = draw.sample(held, len(held))
        assert rest == pytest.approx(0.0, abs=1e-9)
        assert sum((memory - share) / times for share, times in zip(shares, of_ranks)) <= room + 1e-9
    more = draw.uniform(0.0, 20.0)
    assert room_to_save(held, memory + more, occupied).num_bytes <= room + more * growth + 1e-9


def test_ranks_with_most_in_flight_hold_the_state() -> None:
    assert room_to_save((4.0, 2.0, 1.0), 8.0, 12.0).num_bytes == pytest.approx(0.0 + 4.0 / 2.0 + 8.0)
    assert room_to_save((4.0, 2.0, 1.0), 8.0, 25.0) == pytest.approx((-1.0, 3.0))  # a byte of memory is missing


def test_no_assignment_within_memory_recomputes_less() -> None:
    """Five layers on three ranks under every policy each: (bytes saved, seconds of recomputing)."""
    policies = ((8.0, 0.0), (5.0, 1.0), (1.0, 4.0))
    savings = Savings(0.0, 5 * 8.0, ((1 / 3, 15.0, 5.0), (3 / 4, 20.0, 15.0)))
    held, tight = (3.0, 2.0, 1.0), 0
    for memory in (6.0, 8.0, 12.0, 16.0, 20.0, 24.0, 40.0):
        best = math.inf
        for layers in itertools.product(itertools.product(range(3), policies), repeat=5):
            used = [
                sum(times * saved for rank, (saved, _) in layers if rank == place) for place, times in enumerate(held)
            ]
            if max(used) <= memory:
                best = min(best, sum(seconds for _, (_, seconds) in layers))
        least, missing = savings.least_recomputed(held, memory, state=0.0, parts=1)
        assert least <= best + 1e-9 and (missing > 0) == math.isinf(least)
        tight += 0 < least < math.inf and least > 0.5 * best
    assert tight >= 2


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv", "v_half"])
def test_a_unit_lies_where_fewest_micro_batches_wait(schedule: str) -> None:
    """Whatever chunk of its rank it is in."""
    chunks = 4 if schedule == "1f1b" else 8
    held = in_flight(schedule, num_ranks=4, num_microbatches=8, num_chunks=chunks)
    fewest = _fewest_in_flight(schedule, 4, 8, chunks)
    for chunk, times in enumerate(held):
        assert fewest[rank_of_chunk(schedule, chunk, num_ranks=4, num_chunks=chunks)] <= times
    assert sorted(held) == sorted(fewest) if chunks == 4 else set(fewest) < set(held) or len(set(held)) == 1


@pytest.mark.usefixtures("models_traced_once")
def test_more_micro_batches_in_flight_leave_less_room() -> None:
    model = level_one("6-block mlp", "eight")
    fixed = {"pp": 4, "zero": 0, "cp": 1, "tp": 1}
    search = Search(model, model.cluster, read_demands(fixed, time_limit=60.0))
    by_schedule = {}
    units = sum(unit.count for unit in model.step_units.units)
    for each in candidates(model.cluster, global_batch=model.global_batch, num_units=units, demands=search.demands):
        if each.chunks_per_rank == 1 and each.num_microbatches >= 4:
            by_schedule[each.schedule, each.num_microbatches, each.cut] = each
    schedules = {schedule for schedule, _, _ in by_schedule}
    assert {"1f1b", "zb_h1"} <= schedules
    for (schedule, num_microbatches, cut), each in by_schedule.items():
        if schedule == "1f1b" and ("zb_h1", num_microbatches, cut) in by_schedule:
            other = by_schedule["zb_h1", num_microbatches, cut]
            num_less = 0
            for memory in (1e4 * 1.05**step for step in range(200)):
                bounds = Bounds(model, search.demands.training)  # of one memory each
                one, two = bounds.recompute(each, memory), bounds.recompute(other, memory)
                assert one <= two
                num_less += one < two
            assert two == 0.0 and num_less
