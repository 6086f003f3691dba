"""Orders played a wave at a time: the same longest paths and the same steps as an action at a time, to the last bit."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import order_waves, simulator
from cost_models.order_path import Counts, longest_path
from cost_models.schedule_orders import Action
from cost_models.schedules import SCHEDULES
from cost_models.simulator import simulate
from cost_models.step import PipelineStep
from cost_models.step_time import least_step_seconds, played_path, step_seconds
from tests.order_steps import order_steps, path_ends
from tests.step_samples import CHUNKS_PER_RANK, any_steps

SCHEDULE = st.sampled_from(list(SCHEDULES))
STEPS = SCHEDULE.flatmap(lambda schedule: st.sampled_from([(1, 4), (2, 4), (4, 8)]).flatmap(
    lambda shape: any_steps(schedule, *shape)
))  # fmt: skip
COUNTED = {"F": (1, 0, 0), "I": (0, 1, 0), "W": (0, 0, 1), "B": (0, 1, 1)}


@settings(deadline=None, max_examples=25)
@given(STEPS)
def test_a_step_played_by_wave_is_played_alike(step: PipelineStep) -> None:
    by_rank = simulate(step, timeline=True)
    with mock.patch.object(simulator, "MANY_RANKS", 1):
        by_wave = simulate(step)
    assert (by_wave.seconds, by_wave.pipeline_seconds, by_wave.ranks) == (
        by_rank.seconds, by_rank.pipeline_seconds, by_rank.ranks,
    )  # fmt: skip


@settings(deadline=None, max_examples=25)
@given(SCHEDULE, st.sampled_from([(1, 4), (2, 4), (4, 8)]), st.data())
def test_the_longest_path_is_that_of_single_actions(schedule: str, shape: tuple[int, int], data: st.DataObject) -> None:
    num_ranks, num_microbatches = shape
    num_chunks = num_ranks * CHUNKS_PER_RANK[schedule]
    each = st.sampled_from([0.25, 0.5, 1.0])  # equal ones, so that paths tie
    seconds = data.draw(st.lists(st.tuples(each, each, each), min_size=num_chunks, max_size=num_chunks))
    path = longest_path(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, seconds=seconds)
    assert (path.seconds, path.counts) == _path_of_single_actions(schedule, num_ranks, num_microbatches, seconds)


def _path_of_single_actions(
    schedule: str, num_ranks: int, num_microbatches: int, seconds: list[tuple[float, float, float]]
) -> tuple[float, Counts]:
    """Of several that end last, from the one that comes first where ranks take turns."""
    steps = order_steps(schedule, num_ranks, num_microbatches, len(seconds))
    ends = path_ends(steps, seconds)
    place, counts = ends.index(max(ends)), [[0, 0, 0] for _ in seconds]
    while place >= 0:
        kind, chunk, before, source = steps[place]
        counts[chunk] = [count + added for count, added in zip(counts[chunk], COUNTED[kind])]
        place = source if source >= 0 and (before < 0 or ends[source] > ends[before]) else before
    return max(ends), tuple((f, i, w) for f, i, w in counts)


@settings(deadline=None, max_examples=15)
@given(st.sampled_from([name for name, row in SCHEDULES.items() if row.played]), st.data())
def test_paths_of_other_steps_bound_the_seconds_of_a_step(schedule: str, data: st.DataObject) -> None:
    step, other = (data.draw(any_steps(schedule, 2, 6)) for _ in range(2))
    paths = {path.counts for path in map(played_path, (step, other)) if path is not None}
    longest = played_path(step)
    assert longest is not None
    assert least_step_seconds(step, paths - {longest.counts}) <= step_seconds(step).total * (1 + 1e-12)
    assert least_step_seconds(step, paths) == step_seconds(step).total


def test_ranks_that_wait_for_each_other_are_named() -> None:
    orders = ((Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0)))
    order_waves.order_waves.cache_clear()
    with mock.patch.object(order_waves, "actions", return_value=orders), pytest.raises(RuntimeError, match=r"\[0, 1\]"):
        order_waves.order_waves("1f1b", 2, 1, 2)
    order_waves.order_waves.cache_clear()
