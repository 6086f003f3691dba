"""The step simulator: bubbles of the published closed forms, overlap, memory over time, and its own laws."""

from __future__ import annotations

import itertools
from collections import defaultdict
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import simulator
from cost_models.pipeline_play import programs
from cost_models.schedules import SCHEDULES, in_flight, rank_of_chunk
from cost_models.simulator import Event, simulate
from cost_models.step import ChunkCosts, LayerCosts, PipelineStep
from cost_models.step_time import layer_sum, least_simulated
from cost_models.streams import Streams, action_map, layer_tasks, play
from tests.patience import calls_made
from tests.step_samples import any_steps, equal_step

SHAPES = [(2, 4), (4, 8), (4, 32), (8, 16)]


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SHAPES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(schedule: str, num_ranks: int, num_microbatches: int) -> None:
    report = simulate(equal_step(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches))
    expected = (num_ranks - 1) / (num_microbatches + num_ranks - 1)
    assert [rank.bubble_fraction for rank in report.ranks] == pytest.approx([expected] * num_ranks)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SHAPES)
@pytest.mark.parametrize("chunks_per_rank", [2, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(
    num_ranks: int, num_microbatches: int, chunks_per_rank: int
) -> None:
    whole = simulate(equal_step("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches, layers=chunks_per_rank))
    cut = simulate(
        equal_step(
            "interleaved_1f1b",
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            chunks_per_rank=chunks_per_rank,
        )
    )
    assert cut.ranks[0].bubble_seconds == pytest.approx(whole.ranks[0].bubble_seconds / chunks_per_rank)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SHAPES)
def test_zb_h1_has_a_third_of_the_bubble_where_f_i_and_w_are_equal(num_ranks: int, num_microbatches: int) -> None:
    plain = simulate(equal_step("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches))
    split = simulate(equal_step("zb_h1", num_ranks=num_ranks, num_microbatches=num_microbatches))
    for before, after in zip(plain.ranks, split.ranks):
        assert after.bubble_seconds == pytest.approx(before.bubble_seconds / 3)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SHAPES)
def test_zbv_waits_for_nobody_at_the_memory_of_1f1b(num_ranks: int, num_microbatches: int) -> None:
    """No rank waits between its first and last action; what is left is that ranks start one after the other."""
    saved = {"saved_bytes": 1.0}
    plain = simulate(equal_step("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches, layers=2, **saved))
    vee = simulate(equal_step("zbv", num_ranks=num_ranks, num_microbatches=num_microbatches, **saved))
    assert [rank.stall_seconds for rank in vee.ranks] == pytest.approx([0.0] * num_ranks, abs=1e-9)
    assert max(rank.stall_seconds for rank in plain.ranks) > 0
    assert max(rank.peak_bytes for rank in vee.ranks) == max(rank.peak_bytes for rank in plain.ranks)
    assert vee.seconds == pytest.approx(num_microbatches * 6 + (num_ranks - 1))


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SHAPES)
def test_zb_h2_waits_for_nobody_at_almost_twice_the_memory_of_1f1b(num_ranks: int, num_microbatches: int) -> None:
    saved = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "saved_bytes": 1.0}
    plain, split = simulate(equal_step("1f1b", **saved)), simulate(equal_step("zb_h2", **saved))
    assert [rank.stall_seconds for rank in split.ranks] == pytest.approx([0.0] * num_ranks, abs=1e-9)
    assert {rank.peak_bytes for rank in split.ranks} == {2 * plain.ranks[0].peak_bytes - 1}
    assert split.seconds == pytest.approx(num_microbatches * 3 + (num_ranks - 1))


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SHAPES)
def test_v_half_waits_less_than_1f1b_with_half_of_its_memory(num_ranks: int, num_microbatches: int) -> None:
    saved = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "saved_bytes": 1.0}
    plain, half = simulate(equal_step("1f1b", layers=2, **saved)), simulate(equal_step("v_half", **saved))
    most = max(rank.peak_bytes for rank in plain.ranks)
    assert {rank.peak_bytes for rank in half.ranks} == {most / 2 + 2}
    assert half.seconds - 6 * num_microbatches <= 0.6 * (plain.seconds - 6 * num_microbatches)


def test_a_v_takes_as_long_as_its_longest_path_where_nothing_is_communicated() -> None:
    step = equal_step("v_half", num_ranks=4, num_microbatches=16)
    assert least_simulated(step) == pytest.approx(simulate(step).seconds)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_over_time_peaks_at_the_microbatches_in_flight(schedule: str) -> None:
    num_ranks, num_microbatches = 4, 12
    step = equal_step(
        schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, saved_bytes=3.0, state_bytes=5.0
    )
    report = simulate(step, memory=True)
    num_chunks = len(step.chunks)
    counts = in_flight(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    assert report.memory is not None
    for rank, curve in enumerate(report.memory):
        mine = [
            k
            for k in range(num_chunks)
            if rank_of_chunk(schedule, k, num_ranks=num_ranks, num_chunks=num_chunks) == rank
        ]
        state = 5.0 * len(mine)
        assert max(held for _, held in curve) == state + 3.0 * sum(counts[k] for k in mine)
        assert report.ranks[rank].peak_bytes == max(held for _, held in curve)
        assert curve[0] == (0.0, state) and curve[-1][1] == state
        times = [when for when, _ in curve]
        assert times == sorted(times)


def test_a_layers_peak_counts_while_its_chunk_runs() -> None:
    step = equal_step("1f1b", num_ranks=2, num_microbatches=4, saved_bytes=1.0, peak_bytes=10.0)
    assert [rank.peak_bytes for rank in simulate(step).ranks] == [12.0, 11.0]


def one_rank(layer: LayerCosts, layers: int, num_microbatches: int = 1) -> PipelineStep:
    return PipelineStep(
        schedule="1f1b", num_microbatches=num_microbatches, num_ranks=1, chunks=(ChunkCosts(layers=((layer, layers),)),)
    )


def test_gathers_shorter_than_compute_hide_behind_it_but_the_first() -> None:
    layer = LayerCosts(forward=1.0, backward=2.0, gather_forward=0.75, gather_backward=0.75)
    report = simulate(one_rank(layer, 8))
    assert report.seconds == pytest.approx(8 * 3.0 + 0.75)
    assert report.ranks[0].exposed_seconds == pytest.approx(0.75)


def test_gathers_longer_than_compute_bound_the_step_on_their_own_stream() -> None:
    layer = LayerCosts(forward=1.0, backward=1.0, gather_forward=3.0, gather_backward=3.0)
    report = simulate(one_rank(layer, 8))
    assert report.seconds == pytest.approx(16 * 3.0 + 1.0)  # the last layer computes after its gather
    assert report.ranks[0].exposed_seconds == pytest.approx(16 * 2.0 + 1.0)


def test_gradient_reduction_hides_behind_the_last_backward_but_for_the_first_layer() -> None:
    layer = LayerCosts(forward=1.0, backward=2.0, reduce_step=1.5)
    report = simulate(one_rank(layer, 8, num_microbatches=3))
    assert report.seconds == pytest.approx(3 * 8 * 3.0 + 1.5)


def test_gradient_reduction_longer_than_the_last_backward_is_exposed() -> None:
    layer = LayerCosts(forward=1.0, backward=2.0, reduce_step=5.0)
    report = simulate(one_rank(layer, 8, num_microbatches=3))
    first_reduction_starts = 3 * 8 * 3.0 - 7 * 2.0
    assert report.seconds == pytest.approx(first_reduction_starts + 8 * 5.0)
    assert report.ranks[0].exposed_seconds == pytest.approx(report.seconds - 3 * 8 * 3.0)


def test_later_ranks_reduce_while_earlier_ones_still_compute() -> None:
    """Rank 1 is done two seconds before rank 0, and reduces in them."""
    first, second = LayerCosts(forward=1.0, backward=2.0), LayerCosts(forward=1.0, backward=2.0, reduce_step=2.0)
    chunks = (ChunkCosts(layers=((first, 1),)), ChunkCosts(layers=((second, 1),)))
    report = simulate(PipelineStep(schedule="1f1b", num_microbatches=4, num_ranks=2, chunks=chunks))
    assert report.seconds == report.pipeline_seconds


def test_a_reduction_lets_the_next_actions_first_gather_go_before_it() -> None:
    layer = LayerCosts(forward=1.0, backward=2.0, gather_forward=0.5, gather_backward=0.5, reduce_backward=0.5)
    report = simulate(one_rank(layer, 1, num_microbatches=2), timeline=True)
    communication = [(e.label, e.start) for e in report.timeline or () if e.stream == "communication"]
    assert communication == [
        ("gather F0.0", 0.0),
        ("gather B0.0", 0.5),  # while the forward computes
        ("gather F0.1", 1.5),  # while the backward computes, ahead of the gradients that it makes
        ("reduce B0.0", 3.5),
        ("gather B0.1", 4.0),
        ("reduce B0.1", 6.5),
    ]


def test_gathers_run_one_layer_ahead_and_no_further() -> None:
    report = simulate(one_rank(LayerCosts(forward=1.0, backward=2.0, gather_backward=0.5), 3), timeline=True)
    gathers = [event.start for event in report.timeline or () if event.stream == "communication"]
    assert gathers == [2.0, 3.0, 5.0]  # the last forward layer, the first and the second backward layer start


def test_receives_delay_the_receiver_not_the_sender() -> None:
    layer = LayerCosts(forward=1.0, backward=2.0)
    chunks = (
        ChunkCosts(layers=((layer, 1),), receive_backward=0.25),
        ChunkCosts(layers=((layer, 1),), receive_forward=0.5),
    )
    report = simulate(PipelineStep(schedule="gpipe", num_microbatches=3, num_ranks=2, chunks=chunks), timeline=True)
    ends = {(event.rank, event.label): event.end for event in report.timeline or () if event.stream == "compute"}
    assert [ends[0, f"F0.{j}"] for j in range(3)] == [1.0, 2.0, 3.0]
    assert [ends[1, f"F1.{j}"] for j in range(3)] == [2.5, 4.0, 5.5]
    assert [rank.exposed_seconds for rank in report.ranks] == pytest.approx([3 * 0.25, 3 * 0.5])


def test_optimizer_waits_for_all_gradients_and_gathers_after() -> None:
    report = simulate(equal_step("1f1b", num_ranks=2, num_microbatches=2, update_step=0.5, gather_step=0.25))
    assert report.seconds == pytest.approx(report.pipeline_seconds + 0.75)


steps = st.sampled_from(list(SCHEDULES)).flatmap(lambda schedule: any_steps(schedule, 2, 4))


@settings(deadline=None, max_examples=60)
@given(steps)
def test_timeline_obeys_streams_dependencies_and_sums(step: PipelineStep) -> None:
    report = simulate(step, timeline=True)
    assert report.timeline is not None
    assert report.seconds == pytest.approx(max(event.end for event in report.timeline))
    assert least_simulated(step) <= report.seconds * (1 + 1e-9)
    by_stream: dict[tuple[int, str], list[Event]] = defaultdict(list)
    span: dict[str, tuple[float, float]] = {}
    for event in report.timeline:
        by_stream[event.rank, event.stream].append(event)
        if event.stream == "compute" and event.label != "update":
            start, end = span.get(event.label, (event.start, event.end))
            span[event.label] = (min(start, event.start), max(end, event.end))
    for events in by_stream.values():
        for before, after in itertools.pairwise(events):
            assert before.end <= after.start + 1e-9, (before, after)
    last = len(step.chunks) - 1
    for label, (start, _) in span.items():
        kind, chunk, microbatch = label[0], *map(int, label[1:].split("."))
        if kind == "F" and chunk:
            assert span[f"F{chunk - 1}.{microbatch}"][1] <= start + 1e-9
        if kind in "BI" and chunk < last:
            arrival = min(span.get(f"{k}{chunk + 1}.{microbatch}", (0.0, 1e30))[1] for k in "BI")
            assert arrival <= start + 1e-9
    for rank in report.ranks:
        total = rank.compute_seconds + rank.exposed_seconds + rank.bubble_seconds
        assert total == pytest.approx(report.seconds)


@settings(deadline=None, max_examples=40)
@given(steps)
def test_every_second_of_the_layers_is_on_the_timeline(step: PipelineStep) -> None:
    report = simulate(step, timeline=True)
    played: dict[str, float] = defaultdict(float)
    for event in report.timeline or ():
        played[event.stream] += event.end - event.start
    times = step.num_microbatches
    micro = ("gather_forward", "gather_backward", "reduce_backward")
    assert played["compute"] == pytest.approx(
        sum(times * layer_sum(c, "forward", "backward") + layer_sum(c, "update_step") for c in step.chunks)
    )
    assert played["communication"] == pytest.approx(
        sum(times * layer_sum(c, *micro) + layer_sum(c, "reduce_step", "gather_step") for c in step.chunks)
    )


@settings(deadline=None, max_examples=60)
@given(
    steps,
    st.sampled_from("FBIW"),
    st.booleans(),
    st.lists(st.sampled_from([0.0, 0.5, 2.0, 7.0]), min_size=4, max_size=4),
    st.sampled_from([0.0, 1.0]),
)
def test_action_maps_say_what_playing_the_layers_says(
    step: PipelineStep, kind: str, last: bool, free: list[float], pending: float
) -> None:
    tasks = layer_tasks(step.chunks[0], kind, last=last)
    rows = action_map(tasks, pending)
    played = play(tasks, Streams(*free), pending)
    mapped = [max(c + f for c, f in zip(row, free)) for row in (rows.compute, rows.communication, rows.issue)]
    assert mapped == pytest.approx(list(played))


def test_a_chunk_without_layers_passes_microbatches_on() -> None:
    layer = LayerCosts(forward=1.0, backward=2.0, reduce_backward=0.5)
    chunks = (ChunkCosts(layers=((layer, 1),)), ChunkCosts(layers=()))
    report = simulate(PipelineStep(schedule="1f1b", num_microbatches=3, num_ranks=2, chunks=chunks))
    assert report.seconds == pytest.approx(3 * 3.0 + 0.5)


def test_asking_for_more_than_the_schedule_runs_says_why() -> None:
    with pytest.raises(ValueError, match="at least as many micro-batches as ranks"):
        simulate(equal_step("1f1b", num_ranks=4, num_microbatches=2))


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=3, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_a_step_too_long_to_play_goes_on_as_it_has_begun(schedule: str, data: st.DataObject) -> None:
    step = data.draw(any_steps(schedule, 3, 303))
    with mock.patch.object(simulator, "MOST_PLAYED", 120):
        report = simulate(step)
        with pytest.raises(ValueError, match="303 micro-batches has too many events to show: at most 120"):
            simulate(step, timeline=True)
    played = simulate(step)
    assert (report.seconds, report.pipeline_seconds) == pytest.approx((played.seconds, played.pipeline_seconds))
    for rank, expected in zip(report.ranks, played.ranks):
        assert vars(rank) == pytest.approx(vars(expected), abs=1e-9 * played.seconds)


@pytest.mark.parametrize(
    ("schedule", "chunks_per_rank", "num_microbatches", "num_actions"),
    [
        ("interleaved_1f1b", 8, 64, 16 * 8 * 64 * 2),
        ("1f1b", 1, 2048, 16 * 2048 * 2),
        ("zbv", 2, 512, 16 * 2 * 512 * 3),
    ],
)
def test_an_action_is_simulated_in_a_few_calls(
    schedule: str, chunks_per_rank: int, num_microbatches: int, num_actions: int
) -> None:
    step = equal_step(
        schedule,
        num_ranks=16,
        num_microbatches=num_microbatches,
        chunks_per_rank=chunks_per_rank,
        gather_forward=0.5,
        reduce_backward=0.5,
        reduce_step=1.0,
    )
    programs.cache_clear()
    assert calls_made(lambda: simulate(step)) < 40 * num_actions
