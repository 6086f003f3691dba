"""Schedules: orders equal PyTorch's, and the micro-batches in flight are those that the orders hold."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from cost_models.order_checks import fault_of
from cost_models.schedules import SCHEDULES, Action, actions, in_flight, in_flight_peaks, rank_of_chunk, reason_not
from tests.patience import calls_made

#: Schedules that PyTorch has a class for.
OF_PYTORCH = [name for name, row in SCHEDULES.items() if row.torch_class is not None]
CHUNKS_PER_RANK = {name: row.chunks_per_rank or 3 for name, row in SCHEDULES.items()}


class RecordingStage:
    """Stands in for one stage of a PyTorch pipeline: no tensors, but it remembers what it was told to run."""

    is_first = is_last = False
    submod = None
    has_backward = True

    def __init__(self, *, index: int, num_stages: int, rank: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages = index, num_stages
        self.group_rank, self.group_size = rank, num_ranks
        self.ran: list[Action] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.ran.append(Action("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.ran.append(Action("B", self.stage_index, microbatch))

    def perform_reduce_grad(self, *_: Any) -> None:
        pass

    def _no_transfers(self, *_: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_transfers


def stages_of(schedule: str, rank: int, num_ranks: int, num_chunks: int) -> list[RecordingStage]:
    return [
        RecordingStage(index=chunk, num_stages=num_chunks, rank=rank, num_ranks=num_ranks)
        for chunk in range(num_chunks)
        if rank_of_chunk(schedule, chunk, num_ranks=num_ranks, num_chunks=num_chunks) == rank
    ]


def torch_order(
    schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int
) -> tuple[tuple[Action, ...], ...]:
    """What PyTorch's class runs on each rank: recorded for the single-stage classes, read off for the others."""
    schedule_class = getattr(torch_schedules, SCHEDULES[schedule].torch_class)
    if issubclass(schedule_class, torch_schedules.PipelineScheduleSingle):
        return tuple(
            recorded(schedule_class, stages_of(schedule, rank, num_ranks, num_chunks)[0], num_microbatches)
            for rank in range(num_ranks)
        )
    program = schedule_class(stages_of(schedule, 0, num_ranks, num_chunks), num_microbatches).pipeline_order
    return tuple(
        tuple(leaf for action in program[rank] if action is not None for leaf in leaves(action))
        for rank in range(num_ranks)
    )


def recorded(schedule_class: Any, stage: RecordingStage, num_microbatches: int) -> tuple[Action, ...]:
    program = schedule_class(stage, num_microbatches)
    program._initialize_stage = lambda *_: None
    program._step_microbatches([()] * num_microbatches, [{}] * num_microbatches)
    return tuple(stage.ran)


def leaves(action: Any) -> list[Action]:
    if action.sub_actions is not None:
        return [leaf for part in action.sub_actions for leaf in leaves(part)]
    return [Action(action.computation_type.value, action.stage_index, action.microbatch_index)]


def shapes(schedule: str) -> list[tuple[int, int, int]]:
    """(num_ranks, num_microbatches, num_chunks) that the schedule can run, small ones and a few larger."""
    per_rank = (2, 3, 4) if schedule == "interleaved_1f1b" else (CHUNKS_PER_RANK[schedule],)
    candidates = [
        (ranks, microbatches, ranks * chunks)
        for ranks in (1, 2, 3, 4, 5, 8)
        for microbatches in (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 33)
        for chunks in per_rank
    ]
    return [shape for shape in candidates if why_not(schedule, *shape) is None]


def why_not(schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> str | None:
    return reason_not(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)


def order(schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[tuple[Action, ...], ...]:
    return actions(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)


@pytest.mark.parametrize("schedule", OF_PYTORCH)
def test_orders_are_what_pytorch_runs(schedule: str) -> None:
    for shape in shapes(schedule):
        assert order(schedule, *shape) == torch_order(schedule, *shape), shape


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipelines_can_run_the_orders(schedule: str) -> None:
    """Every micro-batch forward and backward on the rank that holds the chunk, and no rank waits for ever."""
    for ranks, microbatches, chunks in shapes(schedule):
        places: list[list[int]] = [[] for _ in range(ranks)]
        for chunk in range(chunks):
            places[rank_of_chunk(schedule, chunk, num_ranks=ranks, num_chunks=chunks)].append(chunk)
        assert fault_of(order(schedule, ranks, microbatches, chunks), places, microbatches) is None


@pytest.mark.parametrize("schedule", OF_PYTORCH)
def test_what_we_refuse_pytorch_refuses(schedule: str) -> None:
    refused = 0
    for ranks in (2, 3, 4):
        for microbatches in (1, 2, 3, 5, 7, 11):
            shape = (ranks, microbatches, ranks * CHUNKS_PER_RANK[schedule])
            if why_not(schedule, *shape) is None:
                continue
            refused += 1
            with pytest.raises(ValueError):
                torch_order(schedule, *shape)
            with pytest.raises(ValueError, match="cannot run"):
                order(schedule, *shape)
    assert refused > 0 or schedule in ("gpipe", "zbv")


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_v_schedules_take_two_chunks_a_rank_here_and_in_pytorch(schedule: str) -> None:
    assert "2 chunk" in str(why_not(schedule, 2, 8, 6))
    three = [RecordingStage(index=chunk, num_stages=6, rank=0, num_ranks=2) for chunk in (0, 2, 4)]
    with pytest.raises(ValueError, match="exactly 2 stages"):
        getattr(torch_schedules, SCHEDULES[schedule].torch_class)(three, 8)


@pytest.mark.parametrize(
    ("schedule", "shape", "reason"),
    [
        ("1f1b", (4, 8, 8), "1 chunk"),
        ("interleaved_1f1b", (4, 8, 4), "at least 2 chunks"),
        ("interleaved_1f1b", (4, 11, 8), "2 rounds"),
        ("1f1b", (4, 3, 4), "at least as many micro-batches as ranks"),
        ("dualpipev", (4, 7, 8), "at least as many micro-batches as chunks"),
        ("gpipe", (4, 8, 6), "do not divide"),
        ("gpipe", (4, 0, 4), "at least 1"),
    ],
)
def test_reasons_name_what_is_wrong(schedule: str, shape: tuple[int, int, int], reason: str) -> None:
    assert reason in str(why_not(schedule, *shape))


def test_unknown_schedules_are_named_with_those_known() -> None:
    with pytest.raises(ValueError, match=r"unknown pipeline schedule 'chimera'.*zb_h1"):
        why_not("chimera", 2, 2, 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_chunk_runs_every_microbatch_forward_and_backward_once(schedule: str) -> None:
    for ranks, microbatches, chunks in shapes(schedule):
        ran = Counter(action for rank in order(schedule, ranks, microbatches, chunks) for action in rank)
        for chunk in range(chunks):
            for microbatch in range(microbatches):
                count = {kind: ran[Action(kind, chunk, microbatch)] for kind in "FBIW"}
                assert count["F"] == 1 and count["I"] == count["W"] and count["B"] + count["I"] == 1


def held_at_first_peak(rank_order: tuple[Action, ...]) -> Counter[int]:
    held: Counter[int] = Counter()
    peak: Counter[int] = Counter()
    for kind, chunk, _ in rank_order:
        held[chunk] += {"F": 1, "B": -1, "W": -1, "I": 0}[kind]
        if held.total() > peak.total():
            peak = held.copy()
    return peak


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_flight_counts_what_the_order_holds_at_its_peak(schedule: str) -> None:
    for ranks, microbatches, chunks in shapes(schedule):
        counts = in_flight(schedule, num_ranks=ranks, num_microbatches=microbatches, num_chunks=chunks)
        for rank, rank_order in enumerate(order(schedule, ranks, microbatches, chunks)):
            mine = [k for k in range(chunks) if rank_of_chunk(schedule, k, num_ranks=ranks, num_chunks=chunks) == rank]
            peak = held_at_first_peak(rank_order)
            assert [counts[k] for k in mine] == [peak[k] for k in mine], (ranks, microbatches, chunks, rank)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_peaks_bound_what_the_order_holds_whatever_the_chunks_weigh(schedule: str) -> None:
    draw = random.Random(0)
    for ranks, microbatches, chunks in shapes(schedule):
        peaks = in_flight_peaks(schedule, num_ranks=ranks, num_microbatches=microbatches, num_chunks=chunks)
        for rank, rank_order in enumerate(order(schedule, ranks, microbatches, chunks)):
            for _ in range(5):
                weights = [draw.choice([0, 1, 2, 7]) for _ in range(chunks)]
                held = itertools.accumulate(
                    {"F": 1, "B": -1, "W": -1, "I": 0}[kind] * weights[chunk] for kind, chunk, _ in rank_order
                )
                heaviest = max(sum(count * weights[chunk] for chunk, count in peak) for peak in peaks[rank])
                assert heaviest == max(held), (ranks, microbatches, chunks, rank, weights)


def test_1f1b_holds_at_most_p_minus_i_microbatches_on_stage_i() -> None:
    assert in_flight("1f1b", num_ranks=4, num_microbatches=16, num_chunks=4) == (4, 3, 2, 1)


def test_zero_bubble_on_a_vee_holds_as_much_as_1f1b_on_its_first_rank() -> None:
    counts = in_flight("zbv", num_ranks=4, num_microbatches=16, num_chunks=8)
    for rank in range(4):
        assert counts[rank] + counts[7 - rank] == 2 * 4  # of chunks half as big


@pytest.mark.parametrize(("num_ranks", "halves"), [(2, 4), (3, 4), (4, 6), (7, 8), (8, 10), (16, 18)])
def test_v_half_holds_half_of_1f1bs_first_rank_and_a_micro_batch_more(num_ranks: int, halves: int) -> None:
    """On every rank; halves of what 1F1B's ranks hold of a micro-batch, as chunks are half as big."""
    counts = in_flight("v_half", num_ranks=num_ranks, num_microbatches=4 * num_ranks, num_chunks=2 * num_ranks)
    assert {counts[rank] + counts[2 * num_ranks - 1 - rank] for rank in range(num_ranks)} == {halves}
    assert halves / 2 <= num_ranks / 2 + 1


def test_zb_h2_holds_twice_as_much_as_1f1bs_first_rank_but_one_micro_batch() -> None:
    assert in_flight("zb_h2", num_ranks=4, num_microbatches=16, num_chunks=4) == (7, 7, 7, 7)


@pytest.mark.parametrize(("schedule", "num_chunks"), [("interleaved_1f1b", 512), ("v_half", 128), ("zb_h2", 64)])
def test_in_flight_is_fast_at_any_scale(schedule: str, num_chunks: int) -> None:
    """Without playing the two million actions one by one."""
    shape = {"num_ranks": 64, "num_microbatches": 2048, "num_chunks": num_chunks}
    assert calls_made(lambda: in_flight_peaks(schedule, **shape)) < 200_000
