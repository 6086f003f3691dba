"""The closed form of the step: equal to the simulation on equal chunks, near it on nearly equal ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.schedules import SCHEDULES
from cost_models.simulator import simulate
from cost_models.step import ChunkCosts, LayerCosts, PipelineStep
from cost_models.step_time import layer_sum, played_path, step_memory, step_seconds
from tests.step_samples import any_steps, equal_step, nearly_equal_steps

EXACT = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"]
SECONDS = st.sampled_from([0.5, 0.8, 1.0, 1.3, 1.7])


def step_in_rounds(
    schedule: str, num_ranks: int, rounds: int, forward: float, inputs: float, weights: float
) -> PipelineStep:
    """Equal chunks and ``rounds`` micro-batches a rank; seconds of a forward, and of each part of a backward."""
    return equal_step(
        schedule,
        num_ranks=num_ranks,
        num_microbatches=num_ranks * rounds,
        forward=forward,
        backward=inputs + weights,
        backward_weight=weights,
    )


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(EXACT), st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 4), SECONDS, SECONDS, SECONDS)
def test_equals_the_simulation_on_equal_chunks(
    schedule: str, num_ranks: int, rounds: int, forward: float, inputs: float, weights: float
) -> None:
    weights = min(weights, forward, inputs)  # longer weight gradients leave ZB-H1 nothing more to fill
    step = step_in_rounds(schedule, num_ranks, rounds, forward, inputs, weights)
    assert step_seconds(step).total == pytest.approx(simulate(step).seconds)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([1, 2, 3, 4, 6]), st.integers(2, 4), SECONDS, SECONDS, SECONDS)
def test_zb_h2_equals_the_simulation_on_equal_chunks(
    num_ranks: int, rounds: int, forward: float, inputs: float, weights: float
) -> None:
    """The published bubble, and never less than the last rank's wait for the first micro-batch."""
    weights = min(weights, forward)
    step = step_in_rounds("zb_h2", num_ranks, rounds, forward, inputs, weights)
    bubble = (num_ranks - 1) * max(forward, forward + inputs - 2 * weights)
    busy = num_ranks * rounds * (forward + inputs + weights)
    assert step_seconds(step).total == pytest.approx(simulate(step).seconds) == pytest.approx(busy + bubble)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([1, 2, 3, 5]), st.integers(1, 8), st.data())
def test_gpipe_equals_the_simulation_however_uneven_its_chunks_are(num_ranks: int, m: int, data: st.DataObject) -> None:
    times = st.floats(0.01, 5.0)
    drawn = data.draw(st.lists(st.tuples(times, times), min_size=num_ranks, max_size=num_ranks))
    received = data.draw(st.floats(0.0, 1.0))
    chunks = tuple(
        ChunkCosts(
            layers=((LayerCosts(forward=forward, backward=backward), 1),),
            receive_forward=received * (rank > 0),
            receive_backward=received * (rank < num_ranks - 1),
        )
        for rank, (forward, backward) in enumerate(drawn)
    )
    step = PipelineStep(schedule="gpipe", num_microbatches=m, num_ranks=num_ranks, chunks=chunks)
    assert step_seconds(step).total == pytest.approx(simulate(step).seconds)


PLAYED = ["zbv", "v_half", "dualpipev"]


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(PLAYED), st.sampled_from([1, 2, 3, 4, 8]), st.integers(2, 3), SECONDS, SECONDS, SECONDS)
def test_two_chunks_a_rank_equal_the_simulation_on_equal_chunks_whatever_their_proportions(
    schedule: str, num_ranks: int, rounds: int, forward: float, inputs: float, weights: float
) -> None:
    step = step_in_rounds(schedule, num_ranks, rounds, forward, inputs, weights)
    assert step_seconds(step).total == pytest.approx(simulate(step).seconds)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(PLAYED), st.sampled_from([2, 4, 8]), st.integers(4, 8), SECONDS, SECONDS, SECONDS)
def test_micro_batches_beyond_those_that_are_played_take_what_the_busiest_rank_does(
    schedule: str, num_ranks: int, rounds: int, forward: float, inputs: float, weights: float
) -> None:
    """Of PyTorch's orders on equal chunks. V-Half's ranks wait in their steady state: all of it is played."""
    step = step_in_rounds(schedule, num_ranks, rounds, forward, inputs, weights)
    assert step_seconds(step).total == pytest.approx(simulate(step).seconds)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([2, 3, 4, 8]), st.sampled_from([2, 3, 4]), st.integers(1, 4), st.integers(0, 3))
def test_a_longer_round_is_not_hidden_when_the_pipeline_fills(num_ranks: int, rounds: int, m: int, place: int) -> None:
    """Chunks of a round alike, one round a tenth longer than the others."""
    long, short = (
        ChunkCosts(layers=((LayerCosts(forward=seconds, backward=2 * seconds), 1),)) for seconds in (1.1, 1.0)
    )
    chunks = [long if index // num_ranks == place % rounds else short for index in range(rounds * num_ranks)]
    step = PipelineStep(
        schedule="interleaved_1f1b", num_microbatches=m * num_ranks, num_ranks=num_ranks, chunks=tuple(chunks)
    )
    assert step_seconds(step).total == pytest.approx(simulate(step).seconds)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from([1, 2, 3, 4]), st.integers(2, 5), st.data())
def test_rounds_that_differ_play_no_quicker(num_ranks: int, m: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.floats(0.01, 5.0), min_size=2, max_size=4))
    layers = [LayerCosts(forward=seconds, backward=2 * seconds) for seconds in sizes for _ in range(num_ranks)]
    chunks = tuple(ChunkCosts(layers=((layer, 1),)) for layer in layers)
    step = PipelineStep(schedule="interleaved_1f1b", num_microbatches=m * num_ranks, num_ranks=num_ranks, chunks=chunks)
    assert step_seconds(step).total <= simulate(step).seconds * (1 + 1e-9)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(PLAYED), st.sampled_from([2, 3, 4, 5]), st.integers(2, 3), st.data())
def test_two_chunks_a_rank_are_priced_as_their_order_plays_however_uneven_they_are(
    schedule: str, num_ranks: int, m: int, data: st.DataObject
) -> None:
    figures = st.tuples(st.floats(0.01, 5.0), st.floats(0.01, 5.0), st.floats(0.01, 5.0))
    drawn = data.draw(st.lists(figures, min_size=2 * num_ranks, max_size=2 * num_ranks))
    chunks = tuple(
        ChunkCosts(layers=((LayerCosts(forward=forward, backward=inputs + weight, backward_weight=weight), 1),))
        for forward, inputs, weight in drawn
    )
    step = PipelineStep(schedule=schedule, num_microbatches=m * num_ranks, num_ranks=num_ranks, chunks=chunks)
    assert step_seconds(step).total >= simulate(step).seconds * (1 - 1e-9)
    path = played_path(step)
    assert path is not None
    assert path.seconds == pytest.approx(simulate(step).seconds)
    along = sum(count * seconds for row, of in zip(path.counts, drawn) for count, seconds in zip(row, of))
    assert along == pytest.approx(path.seconds)


def test_two_chunks_a_rank_gain_nothing_where_one_of_them_is_empty() -> None:
    """A pipeline of one chunk a rank in disguise has that one's bubble, which the published fill does not see."""
    empty, full = (LayerCosts(forward=s, backward=2 * s, backward_weight=s) for s in (0.0, 1.0))
    chunks = tuple(ChunkCosts(layers=((layer, 1),)) for layer in (*[empty] * 4, *[full] * 4))
    step = PipelineStep(schedule="zbv", num_microbatches=8, num_ranks=4, chunks=chunks)
    assert step_seconds(step).pipeline >= 8 * 3.0 + 3 * 1.5
    assert step_seconds(step).pipeline <= simulate(step).pipeline_seconds


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2", "zbv", "v_half"])
@pytest.mark.parametrize(("gather", "reduce"), [(0.7, 0.0), (0.7, 1.3), (0.5, 0.5), (1.2, 0.0), (1.2, 1.8), (0.9, 2.4)])
def test_a_split_backward_hides_gathers_and_reductions_apart(schedule: str, gather: float, reduce: float) -> None:
    """Long chunks: what weight gradients do not hide of their reduction holds up the next action's gathers."""
    layer = LayerCosts(
        forward=1.0,
        backward=2.0,
        backward_weight=0.8,
        gather_forward=gather,
        gather_backward=gather,
        reduce_backward=reduce,
    )
    chunks = (ChunkCosts(layers=((layer, 48),)),) * (4 * SCHEDULES[schedule].chunks_per_rank)
    step = PipelineStep(schedule=schedule, num_microbatches=12, num_ranks=4, chunks=chunks)
    # 8%: first gathers and last reductions are left out; a backward in one piece is up to 17% off
    assert step_seconds(step).total == pytest.approx(simulate(step).seconds, rel=0.08)


ONE_RANK_WAITS = [name for name, schedule in SCHEDULES.items() if not schedule.divided]


def one_tenth(schedules: list[str]) -> st.SearchStrategy[PipelineStep]:
    return st.tuples(st.sampled_from(schedules), st.sampled_from([1, 2, 4])).flatmap(
        lambda case: nearly_equal_steps(case[0], num_ranks=case[1], num_microbatches=8 * case[1], spread=0.1)
    )


def test_ranks_do_not_make_up_in_one_round_for_what_another_round_took() -> None:
    """Every rank has as much to do, but in every round half of them have a long chunk."""
    layer = LayerCosts(forward=1.0, backward=2.0, backward_weight=1.0)
    chunks = tuple(ChunkCosts(layers=((layer, 1 + (k + k // 16) % 2),)) for k in range(64))
    step = PipelineStep(schedule="interleaved_1f1b", num_microbatches=128, num_ranks=16, chunks=chunks)
    simulated = simulate(step).seconds
    assert 0.8 * simulated > 128 * 6 * 3.0  # what each rank has to do: six layers
    assert step_seconds(step).total == pytest.approx(simulated, rel=0.05)


unequal = st.tuples(st.sampled_from(["1f1b", "zb_h1", "gpipe"]), st.sampled_from([2, 4])).flatmap(
    lambda case: nearly_equal_steps(case[0], num_ranks=case[1], num_microbatches=48 * case[1], spread=1.0)
)


@settings(deadline=None, max_examples=150)
@given(one_tenth(ONE_RANK_WAITS))
def test_within_two_percent_of_the_simulation_where_chunks_differ_by_a_tenth(step: PipelineStep) -> None:
    """With at least 8 micro-batches a rank."""
    assert step_seconds(step).total == pytest.approx(simulate(step).seconds, rel=0.02)


@settings(deadline=None, max_examples=60)
@given(one_tenth(["interleaved_1f1b"]))
def test_rounds_wait_for_no_more_than_their_slowest_chunk(step: PipelineStep) -> None:
    """Ranks may run ahead within a round: the formula is up to 7% above where chunks differ by a tenth."""
    seconds, simulated = step_seconds(step).total, simulate(step).seconds
    assert 0.98 * simulated <= seconds <= 1.07 * simulated


@settings(deadline=None, max_examples=60)
@given(unequal)
def test_within_two_percent_of_the_simulation_where_microbatches_are_many(step: PipelineStep) -> None:
    """Chunks up to twice as slow as others, 48 micro-batches a rank: fill and drain hardly matter."""
    assert step_seconds(step).total == pytest.approx(simulate(step).seconds, rel=0.02)


@settings(deadline=None, max_examples=60)
@given(any_steps("1f1b", 1, 5))
def test_one_rank_takes_at_least_its_compute_and_at_least_its_communication(step: PipelineStep) -> None:
    compute = sum(layer_sum(chunk, "forward", "backward") for chunk in step.chunks)
    receives = sum(chunk.receive_forward + chunk.receive_backward for chunk in step.chunks)
    communication = sum(layer_sum(c, "gather_forward", "gather_backward", "reduce_backward") for c in step.chunks)
    seconds = simulate(step).seconds
    assert seconds >= 5 * (compute + receives) * (1 - 1e-9)
    assert seconds >= 5 * communication * (1 - 1e-9)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["1f1b", "gpipe", "interleaved_1f1b"]), st.sampled_from([1, 4]), st.floats(0.0, 2.0))
def test_near_the_simulation_where_communication_hides_behind_many_layers(
    schedule: str, num_ranks: int, seconds: float
) -> None:
    """Chunks of 32 layers: only what the first layer of an action waits for tells them apart."""
    step = equal_step(
        schedule,
        num_ranks=num_ranks,
        num_microbatches=4 * num_ranks,
        layers=32,
        gather_forward=seconds,
        gather_backward=seconds,
        reduce_backward=seconds,
    )
    assert step_seconds(step).total == pytest.approx(simulate(step).seconds, rel=0.02)


def test_hidden_communication_bounds_a_chunk_from_below() -> None:
    slow = equal_step("1f1b", num_ranks=1, num_microbatches=4, gather_forward=3.0, reduce_backward=1.0)
    assert step_seconds(slow).pipeline == 4 * (3.0 + 2.0)


def test_long_reductions_show_in_the_tail() -> None:
    step = equal_step("1f1b", num_ranks=1, num_microbatches=4, layers=8, reduce_step=5.0)
    assert step_seconds(step).tail == 8 * 5.0 - 8 * 2.0
    short = equal_step("1f1b", num_ranks=1, num_microbatches=4, layers=8, reduce_step=1.0)
    assert step_seconds(short).tail == 1.0  # the first layer's has nothing to hide behind


def in_rows(*layers: tuple[LayerCosts, int], rows: tuple[int, ...] = ()) -> PipelineStep:
    """One chunk on one rank, one micro-batch."""
    chunk = ChunkCosts(layers=layers, rows=rows)
    return PipelineStep(schedule="1f1b", num_microbatches=1, num_ranks=1, chunks=(chunk,))


def test_an_embedding_reduces_behind_the_layer_next_to_it() -> None:
    embedding = LayerCosts(forward=0.2, backward=0.6, reduce_backward=8.0)
    layer = LayerCosts(forward=3.6, backward=7.0, gather_forward=1.6, gather_backward=1.6, reduce_backward=3.1)
    step = in_rows((embedding, 1), (layer, 24))
    assert step_seconds(step).tail == pytest.approx(3.1)
    assert 0.0 <= simulate(step).seconds - step_seconds(step).total <= 1.6  # the first gather


def test_a_gather_before_the_last_layer_leaves_less_to_wait_for() -> None:
    embedding = LayerCosts(forward=4.0, backward=0.6, gather_backward=2.0, reduce_backward=8.0)
    layer = LayerCosts(forward=3.6, backward=7.0, reduce_backward=3.1)
    step = in_rows((embedding, 1), (layer, 24))
    assert step_seconds(step).tail == pytest.approx(3.1 - 2.0)
    assert simulate(step).seconds == pytest.approx(step_seconds(step).total)


def test_rows_of_long_reductions_do_not_hide_behind_the_rows_before() -> None:
    encoder, decoder = LayerCosts(forward=2.0, backward=4.0, reduce_step=9.0), LayerCosts(forward=6.0, backward=12.0)
    step = in_rows((encoder, 4), (decoder, 4))
    assert step_seconds(step).tail == 4 * (9.0 - 4.0)
    report = simulate(step)
    assert report.seconds - report.pipeline_seconds == 4 * (9.0 - 4.0) + 4.0  # nothing hides in the first backward


def test_layers_of_one_row_run_in_any_order() -> None:
    long, short = (LayerCosts(forward=1.0, backward=2.0, reduce_step=seconds) for seconds in (9.0, 1.0))
    step = in_rows((short, 3), (long, 2), (LayerCosts(forward=1.0, backward=20.0), 1), rows=(0, 0, 1))
    assert step_seconds(step).tail == 2 * (9.0 - 2.0) - 3 * (2.0 - 1.0)


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 1), ("1f1b", 4), ("gpipe", 2)])
@pytest.mark.parametrize(("gather", "reduce"), [(0.3, 0.3), (0.9, 0.9), (1.2, 0.6), (1.5, 1.0)])
@pytest.mark.parametrize("sums", [0.1, 0.8, 1.5])
def test_sums_over_replicas_hold_up_the_last_gathers_of_every_rank(
    schedule: str, num_ranks: int, gather: float, reduce: float, sums: float
) -> None:
    """Hybrid sharding: a formula that hides sums behind gathers is up to 30% below."""
    step = equal_step(
        schedule,
        num_ranks=num_ranks,
        num_microbatches=2 * num_ranks - 1,
        layers=32,
        gather_forward=gather,
        gather_backward=gather,
        reduce_backward=reduce,
        reduce_step=sums,
    )
    assert step_seconds(step).total == pytest.approx(simulate(step).seconds, rel=0.025)


def test_later_ranks_have_the_earlier_ranks_drain_to_reduce_in() -> None:
    quiet, reducing = (LayerCosts(forward=1.0, backward=2.0, reduce_step=seconds) for seconds in (0.0, 5.0))
    chunks = tuple(ChunkCosts(layers=((layer, 1),)) for layer in (quiet, reducing, quiet, reducing))
    step = PipelineStep(schedule="interleaved_1f1b", num_microbatches=4, num_ranks=2, chunks=chunks)
    # the rank's last backwards, another micro-batch of the chunk that it does last, one chunk of rank 0's
    assert step_seconds(step).tail == 2 * 5.0 - 2 * 2.0 - 2.0 - 2.0
    assert simulate(step).seconds == step_seconds(step).total + 2.0  # the last chunk's own layer


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([2, 4]),
    st.sampled_from([2, 3]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.floats(0.0, 20.0),
    st.sampled_from([0.0, 0.2, 0.5]),
)
def test_tail_of_rounds_is_within_one_layers_backward_of_the_simulation(
    num_ranks: int, chunks_per_rank: int, rounds: int, layers: int, reduce_step: float, gather: float
) -> None:
    gathers = {"gather_forward": gather, "gather_backward": gather}
    chunk = ChunkCosts(layers=((LayerCosts(forward=1.0, backward=2.0, reduce_step=reduce_step, **gathers), layers),))
    step = PipelineStep(
        schedule="interleaved_1f1b",
        num_microbatches=rounds * num_ranks,
        num_ranks=num_ranks,
        chunks=(chunk,) * (num_ranks * chunks_per_rank),
    )
    beyond = simulate(step).seconds - step_seconds(step).total
    assert beyond >= -1e-6
    if not gather:
        assert beyond <= 2.0 + 1e-6  # one layer's backward


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["gpipe", "1f1b"]), st.sampled_from([1, 2, 4]), st.integers(2, 8), st.floats(0.1, 6.0))
def test_tail_is_within_one_layers_backward_of_the_simulation(
    schedule: str, num_ranks: int, layers: int, reduce_step: float
) -> None:
    step = equal_step(schedule, num_ranks=num_ranks, num_microbatches=8, layers=layers, reduce_step=reduce_step)
    report = simulate(step)
    assert step_seconds(step).tail == pytest.approx(report.seconds - report.pipeline_seconds, abs=2.0 + 1e-6)


#: Schedules whose chunks end in gradients of weights.
WEIGHTS_LAST = [name for name, row in SCHEDULES.items() if row.ends_in_weights]


@pytest.mark.parametrize("schedule", WEIGHTS_LAST)
@settings(deadline=None, max_examples=40)
@given(st.sampled_from([2, 4, 8]), st.sampled_from([2, 4]), st.sampled_from([1.0, 1.3, 2.0]), st.floats(0.1, 6.0))
def test_gradients_of_weights_alone_hide_reductions(
    schedule: str, num_ranks: int, rounds: int, inputs: float, reduce_step: float
) -> None:
    step = equal_step(
        schedule, num_ranks=num_ranks, num_microbatches=rounds * num_ranks, layers=16, backward=1.0 + inputs,
        reduce_step=reduce_step,
    )  # fmt: skip
    report = simulate(step)
    tail = report.seconds - report.pipeline_seconds
    assert step_seconds(step).tail >= tail - 1.0 - 1e-6  # the first layer's, which the simulation does not hide
    if step.num_ranks == len(step.chunks):
        assert step_seconds(step).tail == pytest.approx(tail, abs=1.0 + 1e-6)
    assert step_seconds(step).tail <= tail + 0.05 * report.seconds  # two chunks of a rank may have longer than priced


def test_the_last_rank_of_zb_h1_is_done_before_the_others() -> None:
    quiet, reducing = (LayerCosts(forward=1.0, backward=3.0, backward_weight=1.0, reduce_step=each) for each in (0, 9))
    chunks = tuple(ChunkCosts(layers=((layer, 1),)) for layer in (quiet, quiet, reducing))
    step = PipelineStep(schedule="zb_h1", num_microbatches=6, num_ranks=3, chunks=chunks)
    assert step_seconds(step).tail == 9.0 - 1.0 - 2 * (2.0 - 1.0)  # its weights, what each rank is done later
    report = simulate(step)
    assert report.seconds - report.pipeline_seconds == step_seconds(step).tail + 1.0  # nothing hides in the first layer


def test_the_first_rank_of_two_chunks_reduces_the_models_end_behind_the_whole_drain() -> None:
    quiet, reducing = (LayerCosts(forward=1.0, backward=2.0, backward_weight=1.0, reduce_step=each) for each in (0, 9))
    chunks = tuple(ChunkCosts(layers=((layer, 1),)) for layer in (quiet, quiet, quiet, quiet, quiet, reducing))
    step = PipelineStep(schedule="zbv", num_microbatches=6, num_ranks=3, chunks=chunks)
    assert step_seconds(step).tail == max(0.0, 9.0 - 2 * 1.0 - 4 * 2.0 / 2 - 1.0)  # its weights, the drain, rank 1


def test_the_slowest_ranks_update_ends_the_step() -> None:
    quick = ChunkCosts(layers=((LayerCosts(forward=1.0, backward=2.0, update_step=0.5), 1),))
    slow = ChunkCosts(layers=((LayerCosts(forward=1.0, backward=2.0, update_step=0.5, gather_step=0.25), 3),))
    step = PipelineStep(schedule="1f1b", num_microbatches=2, num_ranks=2, chunks=(quick, slow))
    assert step_seconds(step).update == 3 * 0.75


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_equals_the_simulations_on_equal_chunks(schedule: str) -> None:
    step = equal_step(
        schedule, num_ranks=4, num_microbatches=12, layers=2, state_bytes=7.0, saved_bytes=3.0, peak_bytes=11.0
    )
    assert step_memory(step) == pytest.approx([rank.peak_bytes for rank in simulate(step).ranks])


def test_chunks_must_divide_over_ranks() -> None:
    chunk = ChunkCosts(layers=((LayerCosts(forward=1.0, backward=2.0), 1),))
    with pytest.raises(ValueError, match="3 chunks on 2 ranks"):
        step_seconds(PipelineStep(schedule="1f1b", num_microbatches=4, num_ranks=2, chunks=(chunk,) * 3))
