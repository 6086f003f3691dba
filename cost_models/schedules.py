"""Pipeline schedules: which rank holds which chunk of the model, and in what order each rank runs its actions.

The orders are those that ``torch.distributed.pipelining.schedules`` runs (``SCHEDULES`` says which class), so that a
plan priced here is the program that trains; ``cost_models.schedule_orders`` generates them, without torch. Those that
people register (``cost_models.registered_schedules``) bring an order of their own, which torch runs action by action.

Where PyTorch's orders differ from the papers:

* ``1f1b``: the class's ``_get_pipeline_order`` numbers the last rank's micro-batches off by one; what its ``step`` runs
  (and what is here) is the published order.
* ``interleaved_1f1b``: micro-batches go in rounds of ``num_microbatches // max(1, num_microbatches // num_ranks)``,
  the paper's rounds of ``num_ranks`` where that divides.
* ``zb_h1``: ``ScheduleInterleavedZeroBubble`` with one stage a rank (its name in the paper's code is ZB1P): weight
  gradients of rank r lag r micro-batches behind.
* ``zbv``: fixed for equal seconds of F, I and W, not solved for the seconds at hand.
* ``dualpipev``: a forward and a backward that may overlap are one action in PyTorch, run in this order where no
  overlapping function is registered; here they are two actions.

``zb_h2`` and ``v_half`` PyTorch does not have: it runs the orders here action by action. As published they let ranks
update their weights before others have finished a step, and take that back if the norm is to be clipped; here all ranks
wait for the norm, as under every schedule.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from cost_models import schedule_orders
from cost_models.order_checks import as_actions, fault_of, peaks_of_order
from cost_models.schedule_orders import Action, microbatches_per_round

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "actions",
    "in_flight",
    "in_flight_peaks",
    "rank_of_chunk",
    "reason_not",
]

#: (chunk, micro-batches in flight) of each chunk of one rank.
Held = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One schedule, as the planner needs to know it.

    Attributes:
        name: its name here.
        torch_class: the class of ``torch.distributed.pipelining.schedules`` that runs this order; None where PyTorch
            has none, and runs it action by action.
        placement: "loop": chunk k is on rank k mod p; "vee": down the ranks and back up.
        chunks_per_rank: how many chunks a rank must hold; None: any number from 2 on.
        splits_backward: whether some backward passes run as input gradients ("I") and, later, weight gradients ("W").
        splits_all: whether all of them do.
        fills: what each rank adds to the fill and drain of the pipeline, the largest of these (φF, φB, φW): φF seconds
            of forward, φB of input gradients and φW of weight gradients (see ``cost_models.step_time``).
        spared: forwards by which the first row falls short of that, of all ranks together (see ``fills_on``).
        by_direction: whether all forwards come before all backwards, each as fast as the rank that is slowest at them.
        divided: whether fill and drain shrink by the number of chunks a rank holds.
        played: for how many micro-batches a rank the pipeline takes no less than the longest path of the order, those
            beyond as long as the busiest rank; 0 where the fills are enough.
        ends_in_weights: whether each chunk's last action makes weight gradients alone, which alone hide its reductions.
        slack: each rank is done (on_inputs, on_weight) later than the rank behind it, where reductions hide, too: so
            many seconds of its gradients of inputs and of weights, unless less than nothing.
        slack_of_all: the same of every other rank but the first and the last, where all chunks of a rank are reduced.
        order: of a registered schedule: (rank, ranks, micro-batches, chunks a rank) → the rank's actions.
    """

    name: str
    torch_class: str | None
    placement: Literal["loop", "vee"]
    chunks_per_rank: int | None
    splits_backward: bool
    fills: tuple[tuple[float, float, float], ...]
    splits_all: bool = False
    spared: float = 0
    by_direction: bool = False
    divided: bool = False
    played: float = 0
    ends_in_weights: bool = False
    slack: tuple[float, float] = (1, 1)
    slack_of_all: tuple[float, float] = (1, 1)
    order: Callable[[int, int, int, int], Any] | None = None

    def fills_on(self, num_ranks: int) -> tuple[tuple[float, float, float], ...]:
        """``fills`` on so many ranks: (p − 1) of the first row are less by ``spared`` forwards of each chunk."""
        (on_forward, on_inputs, on_weight), *others = self.fills
        return (on_forward - self.spared / max(1, num_ranks - 1), on_inputs, on_weight), *others

    def slack_seconds(self, backward: float, weight: float, *, of_all: bool = False) -> float:
        """``slack``, or ``slack_of_all``, of a layer: ``backward`` seconds, ``weight`` of them for weights."""
        on_inputs, on_weight = self.slack_of_all if of_all else self.slack
        return max(0.0, on_inputs * (backward - weight) + on_weight * weight)


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule(
            name="gpipe",
            torch_class="ScheduleGPipe",
            placement="loop",
            chunks_per_rank=1,
            splits_backward=False,
            fills=((1, 1, 1),),
            by_direction=True,
        ),
        Schedule(
            name="1f1b",
            torch_class="Schedule1F1B",
            placement="loop",
            chunks_per_rank=1,
            splits_backward=False,
            fills=((1, 1, 1),),
        ),
        Schedule(
            name="interleaved_1f1b",
            torch_class="ScheduleInterleaved1F1B",
            placement="loop",
            chunks_per_rank=None,
            splits_backward=False,
            fills=((1, 1, 1),),
            divided=True,
        ),
        Schedule(
            name="zb_h1",
            torch_class="ScheduleInterleavedZeroBubble",
            placement="loop",
            chunks_per_rank=1,
            splits_backward=True,
            fills=((1, 1, -1), (1, 0, 0), (0, 1, 0)),
            splits_all=True,
            ends_in_weights=True,
            slack=(1, -1),
            slack_of_all=(1, -1),
        ),
        Schedule(
            name="zb_h2",
            torch_class=None,
            placement="loop",
            chunks_per_rank=1,
            splits_backward=True,
            fills=((1, 0, 0), (1, 1, -2)),
            splits_all=True,
            ends_in_weights=True,
            slack=(0, 0),
            slack_of_all=(0, 0),
        ),
        Schedule(
            name="zbv",
            torch_class="ScheduleZBVZeroBubble",
            placement="vee",
            chunks_per_rank=2,
            splits_backward=True,
            fills=((0, 0.5, 0),),
            splits_all=True,
            played=3,
            ends_in_weights=True,
            slack=(0, 0),
            slack_of_all=(-1, 2),
        ),
        Schedule(
            name="v_half",
            torch_class=None,
            placement="vee",
            chunks_per_rank=2,
            splits_backward=True,
            fills=((0.5, 1, -0.5),),
            splits_all=True,
            played=math.inf,
            ends_in_weights=True,
            slack=(1, -1),
            slack_of_all=(1, -1),
        ),
        Schedule(
            name="dualpipev",
            torch_class="ScheduleDualPipeV",
            placement="vee",
            chunks_per_rank=2,
            splits_backward=True,
            fills=((0, 1, -0.5), (0.5, 0.5, -0.5), (0.5, 0, 0)),
            spared=0.5,
            played=3,
            ends_in_weights=True,
            slack=(1, -1),
            slack_of_all=(1, -1),
        ),
    )
}


def schedule_named(name: str) -> Schedule:
    """The row of ``SCHEDULES``.

    Raises:
        ValueError: if there is none of that name.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown pipeline schedule {name!r}: expected one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def add_schedule(row: Schedule) -> None:
    """Add a row that brings its order."""
    SCHEDULES[row.name] = row


def remove_schedule(name: str) -> None:
    """Remove a row, and what was computed of it."""
    del SCHEDULES[name]
    for cached in (_actions, _registered_orders, _in_flight, _in_flight_peaks):
        cached.cache_clear()


def rank_of_chunk(schedule: str, chunk: int, *, num_ranks: int, num_chunks: int) -> int:
    """The pipeline rank that holds ``chunk`` (0 is the model's first)."""
    if schedule_named(schedule).placement == "vee" and chunk >= num_ranks:
        return num_chunks - 1 - chunk
    return chunk % num_ranks


def reason_not(schedule: str, *, num_ranks: int, num_microbatches: int, num_chunks: int) -> str | None:
    """Why PyTorch could not run this combination, in one sentence; None if it can."""
    row = schedule_named(schedule)
    if min(num_ranks, num_microbatches, num_chunks) < 1:
        return "ranks, micro-batches and chunks must be at least 1"
    if num_chunks % num_ranks:
        return f"{num_chunks} chunks do not divide over {num_ranks} ranks"
    chunks_per_rank = num_chunks // num_ranks
    if row.chunks_per_rank is None and chunks_per_rank < 2:
        return f"{schedule} needs at least 2 chunks a rank, not {chunks_per_rank}"
    if row.chunks_per_rank not in (None, chunks_per_rank):
        return f"{schedule} needs {row.chunks_per_rank} chunk(s) a rank, not {chunks_per_rank}"
    if row.order is not None:
        orders = _registered_orders(schedule, num_ranks, num_microbatches, num_chunks)
        return orders if isinstance(orders, str) else None
    return _MICROBATCH_RULES.get(schedule, _any_number)(num_ranks, num_microbatches)


def actions(schedule: str, *, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[tuple[Action, ...], ...]:
    """What each rank runs, in order (see ``Action``).

    Raises:
        ValueError: if the combination cannot run; the message is that of ``reason_not``.
    """
    _check(schedule, num_ranks, num_microbatches, num_chunks)
    return _actions(schedule, num_ranks, num_microbatches, num_chunks)


def in_flight(schedule: str, *, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[float, ...]:
    """Per chunk: the micro-batches whose saved activations it holds when its rank first holds the most in all.

    A micro-batch is held from its forward until its weight gradients are done. Closed forms of the orders:
    ``gpipe`` all; ``1f1b`` min(m, p − r) on rank r; ``interleaved_1f1b`` the forwards of the warm-up and one more;
    ``zb_h1`` min(m, p) on every rank; ``zb_h2`` min(m, 2p − 1); ``zbv`` 2p in all (the memory of 1F1B's first rank, as
    chunks are half as big); ``dualpipev`` one more; ``v_half`` p + 1, or p + 2 where p is even.

    Raises:
        ValueError: if the combination cannot run; the message is that of ``reason_not``.
    """
    return _in_flight(schedule, num_ranks, num_microbatches, num_chunks)


def in_flight_peaks(
    schedule: str, *, num_ranks: int, num_microbatches: int, num_chunks: int
) -> tuple[tuple[Held, ...], ...]:
    """Per rank: the moments at which it may hold most bytes, each as (chunk, micro-batches in flight) of its chunks.

    A rank's saved activations peak at max over these of Σ count · saved bytes of a micro-batch, whatever the chunks'
    bytes are. The first moment is that of ``in_flight``, which is enough where a rank's chunks save equal bytes.

    Raises:
        ValueError: if the combination cannot run; the message is that of ``reason_not``.
    """
    return _in_flight_peaks(schedule, num_ranks, num_microbatches, num_chunks)


def _check(schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
    reason = reason_not(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    if reason is not None:
        raise ValueError(
            f"schedule {schedule!r} cannot run {num_microbatches} micro-batches through {num_chunks} chunks "
            f"on {num_ranks} ranks: {reason}"
        )


@functools.lru_cache(maxsize=4)
def _actions(schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[tuple[Action, ...], ...]:
    if schedule not in schedule_orders.ORDERS:
        orders = _registered_orders(schedule, num_ranks, num_microbatches, num_chunks)
        assert not isinstance(orders, str)
        return orders
    order = schedule_orders.ORDERS[schedule]
    return tuple(tuple(order(rank, num_ranks, num_microbatches, num_chunks // num_ranks)) for rank in range(num_ranks))


@functools.lru_cache(maxsize=64)
def _registered_orders(
    schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int
) -> tuple[tuple[Action, ...], ...] | str:
    """The orders of a registered schedule; why there are none, where its function says so.

    Raises:
        ValueError: if no pipeline can run what the function gives.
    """
    order = SCHEDULES[schedule].order
    assert order is not None
    chunks_of_ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for chunk in range(num_chunks):
        chunks_of_ranks[rank_of_chunk(schedule, chunk, num_ranks=num_ranks, num_chunks=num_chunks)].append(chunk)
    try:
        entries = [list(order(rank, num_ranks, num_microbatches, num_chunks // num_ranks)) for rank in range(num_ranks)]
    except ValueError as error:
        return str(error)
    where = f"{num_microbatches} micro-batches through {num_chunks} chunks on {num_ranks} ranks"
    try:
        orders = tuple(map(as_actions, entries))
    except ValueError as error:
        raise ValueError(f"the order of schedule {schedule!r} for {where}: {error}") from None
    fault = fault_of(orders, chunks_of_ranks, num_microbatches)
    if fault is not None:
        raise ValueError(f"the order of schedule {schedule!r} for {where} cannot run: {fault}")
    return orders


@functools.lru_cache(maxsize=4096)
def _in_flight(schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[float, ...]:
    counts = [0.0] * num_chunks
    for peaks in _in_flight_peaks(schedule, num_ranks, num_microbatches, num_chunks):
        for chunk, count in peaks[0]:
            counts[chunk] = float(count)
    return tuple(counts)


@functools.lru_cache(maxsize=4096)
def _in_flight_peaks(
    schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int
) -> tuple[tuple[Held, ...], ...]:
    _check(schedule, num_ranks, num_microbatches, num_chunks)
    if schedule not in _PEAKS:
        orders = _actions(schedule, num_ranks, num_microbatches, num_chunks)
        return tuple(tuple(peaks_of_order(order, sorted({action.chunk for action in order}))) for order in orders)
    peaks = _PEAKS[schedule]
    return tuple(tuple(peaks(rank, num_ranks, num_microbatches, num_chunks // num_ranks)) for rank in range(num_ranks))


def _any_number(num_ranks: int, num_microbatches: int) -> str | None:
    return None


def _at_least_ranks(num_ranks: int, num_microbatches: int) -> str | None:
    if num_microbatches < num_ranks:
        return f"needs at least as many micro-batches as ranks ({num_ranks})"
    return None


def _at_least_chunks(num_ranks: int, num_microbatches: int) -> str | None:
    if num_microbatches < 2 * num_ranks:
        return f"needs at least as many micro-batches as chunks ({2 * num_ranks})"
    return None


def _whole_rounds(num_ranks: int, num_microbatches: int) -> str | None:
    rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % rounds:
        return f"micro-batches must divide into {rounds} rounds (one for each {num_ranks} of them)"
    return None


_MICROBATCH_RULES: dict[str, Callable[[int, int], str | None]] = {
    "1f1b": _at_least_ranks,
    "interleaved_1f1b": _whole_rounds,
    "zb_h1": _whole_rounds,
    "dualpipev": _at_least_chunks,
}


def _peaks_interleaved(rank: int, num_ranks: int, num_microbatches: int, chunks: int) -> list[Held]:
    """After the forwards of the warm-up and one more, and each time that forwards or backwards turn to another chunk.

    In between, one chunk gains what another loses, so that no other moment holds more bytes.
    """
    per_round = microbatches_per_round(num_ranks, num_microbatches)
    total = num_microbatches * chunks
    ahead = min(schedule_orders.interleaved_warmup(rank, num_ranks, num_microbatches, chunks) + 1, total)
    last = min(total - ahead, per_round * chunks)
    turns = {0, last}
    for turn in range(chunks + 1):
        turns |= {turn * per_round, (turn * per_round - ahead) % (per_round * chunks)}
    peaks = []
    for num_backwards in sorted(turn for turn in turns if turn <= last):
        forwards = _by_turn(num_backwards + ahead, per_round, chunks)
        backwards = _by_turn(num_backwards, per_round, chunks)[::-1]
        peaks.append(tuple((i * num_ranks + rank, forwards[i] - backwards[i]) for i in range(chunks)))
    return list(dict.fromkeys(peaks))


def _by_turn(count: int, per_turn: int, places: int) -> list[int]:
    """How many of ``count`` things each place gets if they are dealt out ``per_turn`` at a time, place after place."""
    rounds, rest = divmod(count, per_turn * places)
    return [rounds * per_turn + min(max(rest - place * per_turn, 0), per_turn) for place in range(places)]


def _peaks_zbv(rank: int, num_ranks: int, num_microbatches: int, chunks: int) -> list[Held]:
    """At the end of the warm-up, and in the steady state once the chunk on the way down has run one more."""
    down, up = 2 * num_ranks - 1 - rank, rank + 1
    peaks: list[Held] = [((rank, min(num_microbatches, down)), (2 * num_ranks - 1 - rank, min(num_microbatches, up)))]
    if num_microbatches > down:
        peaks.append(((rank, down + 1), (2 * num_ranks - 1 - rank, up - 1)))
    return peaks


def _peaks_v_half(rank: int, num_ranks: int, num_microbatches: int, chunks: int) -> list[Held]:
    """Those of so many micro-batches that the first is done before the last begins: more hold no more."""
    return _peaks_of_v_half(rank, num_ranks, min(num_microbatches, num_ranks + 4))


@functools.lru_cache(maxsize=1024)
def _peaks_of_v_half(rank: int, num_ranks: int, num_microbatches: int) -> list[Held]:
    order = tuple(schedule_orders.v_half(rank, num_ranks, num_microbatches, 2))
    return peaks_of_order(order, (rank, 2 * num_ranks - 1 - rank))


#: Per schedule: (rank, num_ranks, num_microbatches, chunks per rank) to what the rank holds whenever it holds most.
_PEAKS: dict[str, Callable[[int, int, int, int], list[Held]]] = {
    "gpipe": lambda rank, ranks, microbatches, _: [((rank, microbatches),)],
    "1f1b": lambda rank, ranks, microbatches, _: [((rank, min(microbatches, ranks - rank)),)],
    "interleaved_1f1b": _peaks_interleaved,
    "zb_h1": lambda rank, ranks, microbatches, _: [((rank, min(microbatches, ranks)),)],
    "zb_h2": lambda rank, ranks, microbatches, _: [((rank, min(microbatches, 2 * ranks - 1)),)],
    "zbv": _peaks_zbv,
    "v_half": _peaks_v_half,
    "dualpipev": lambda rank, ranks, microbatches, _: [((rank, 2 * ranks - rank), (2 * ranks - 1 - rank, rank + 1))],
}
