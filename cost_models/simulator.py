"""A training step played event by event: each rank's compute and communication stream, and what waits for what.

Each rank runs its actions in the schedule's order (``cost_models.schedules``). A forward waits for the chunk before, a
backward for the chunk after; the receiver then takes ``receive_forward`` or ``receive_backward`` seconds, in which it
computes nothing, while the sender goes on. Inside an action the layers play on the two streams
(``cost_models.streams``). The last gradients of each chunk are reduced over the data axis layer by layer, behind
what is still to compute. The optimizer starts when every rank's gradients are there, since their norm is clipped over
all of them; then updated parameters are gathered.

Of a step of more than ``MOST_PLAYED`` micro-batches two shorter ones are played. By then the pipeline is in its steady
state, in which every round of micro-batches takes as long as the one before: seconds, and bytes where they grow with
the micro-batches, go on at the rate from the shorter to the longer one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

from cost_models.pipeline_play import PipelineActions, PlayedRank, Player, programs, run
from cost_models.step import ChunkCosts, PipelineStep
from cost_models.step_time import chunks_of_ranks, layer_sum, peak_bytes
from cost_models.streams import Recorder, play
from cost_models.wave_play import MANY_RANKS, play_in_waves

#: Micro-batches of the longest step that is played to its end.
MOST_PLAYED = 16384


class Event(NamedTuple):
    """One stretch of the timeline, in seconds from the start of the step.

    ``stream`` is "compute", "communication" (parameters and gradients over the data axis) or "receive". Labels name
    actions as kind, chunk and micro-batch: ``F3.7``, ``gather F3.7``, ``reduce B3.7``.
    """

    rank: int
    stream: str
    label: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One pipeline rank over the step. ``compute``, ``exposed`` and ``bubble`` add up to the step's seconds.

    Attributes:
        compute_seconds: computing, the optimizer included.
        exposed_seconds: the compute stream waits for communication: receives, gathers that come too late, gradient
            reductions after the pipeline is done, gathers after the optimizer.
        bubble_seconds: the rest: waiting for other ranks.
        bubble_fraction: its share of the step.
        stall_seconds: the part of the bubble between the rank's first and last action, which is all that is left where
            steps follow each other without all ranks waiting for each other (as in Qi et al. 2023).
        peak_bytes: most bytes held: state, saved activations in flight, the running chunk's largest peak.
    """

    compute_seconds: float
    exposed_seconds: float
    bubble_seconds: float
    bubble_fraction: float
    stall_seconds: float
    peak_bytes: float


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What the simulator found.

    Attributes:
        seconds: the whole step.
        pipeline_seconds: until the last rank has computed its last gradient.
        ranks: one report a pipeline rank.
        timeline: every event, by rank and start; None unless asked for.
        memory: per rank the bytes held from a time on, as (seconds, bytes) in order; None unless asked for.
    """

    seconds: float
    pipeline_seconds: float
    ranks: tuple[RankReport, ...]
    timeline: tuple[Event, ...] | None = None
    memory: tuple[tuple[tuple[float, float], ...], ...] | None = None

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' seconds spent waiting for other ranks."""
        return sum(rank.bubble_fraction for rank in self.ranks) / len(self.ranks)

    @property
    def exposed_share(self) -> float:
        """Share of all ranks' seconds spent waiting for communication."""
        return (
            sum(rank.exposed_seconds for rank in self.ranks) / len(self.ranks) / self.seconds if self.seconds else 0.0
        )


def simulate(step: PipelineStep, *, timeline: bool = False, memory: bool = False) -> StepReport:
    """Play ``step``; with every event if ``timeline``, with bytes over time if ``memory``.

    Raises:
        ValueError: if the schedule cannot run this many chunks and micro-batches; if a step of more than
            ``MOST_PLAYED`` micro-batches is asked for every event.
    """
    if step.num_microbatches > MOST_PLAYED:
        if timeline or memory:
            raise ValueError(
                f"a step of {step.num_microbatches:,} micro-batches has too many events to show: at most "
                f"{MOST_PLAYED:,} micro-batches are played, plan with a smaller global_batch or larger micro-batches"
            )
        return _continued(step)
    return _played(step, timeline=timeline, memory=memory) if timeline or memory else _remembered(step)


@functools.lru_cache(maxsize=64)
def _remembered(step: PipelineStep) -> StepReport:
    """A search asks for the same step again where it looks for a smaller gap."""
    return _played(step)


def _played(step: PipelineStep, *, timeline: bool = False, memory: bool = False) -> StepReport:
    keeps = timeline or memory
    if step.num_ranks >= MANY_RANKS and not keeps:
        played = play_in_waves(step)
        return _report(played, _end_of(step, played))
    shape = (step.schedule, step.num_ranks, step.num_microbatches, len(step.chunks))
    players = [Player(step.chunks, program, keep=keeps) for program in programs(*shape)]
    run(players, len(step.chunks) * step.num_microbatches)
    curves = [
        _bytes_by_action(step.chunks, own_chunks, player.program)
        for player, own_chunks in zip(players, chunks_of_ranks(step))
    ]
    played = [_played_rank(player, curve) for player, curve in zip(players, curves)]
    end = _end_of(step, played)
    over_time = (_bytes_over_time(player, curve) for player, curve in zip(players, curves))
    return replace(
        _report(played, end),
        timeline=_events(players, end) if timeline else None,
        memory=tuple(over_time) if memory else None,
    )


def _played_rank(player: Player, curve: list[tuple[float, float]]) -> PlayedRank:
    return PlayedRank(
        compute=player.compute,
        reduced=player.reduced(),
        computing=player.compute_seconds(),
        occupied=player.occupied,
        stalled=player.stalled(),
        peak_bytes=max(running for running, _ in curve),
    )


class _End(NamedTuple):
    """When the pipeline is done, when all gradients are reduced; by rank, seconds of optimizer and gathers then."""

    pipeline: float
    reduced: float
    updates: list[float]
    gathers: list[float]


def _end_of(step: PipelineStep, played: list[PlayedRank]) -> _End:
    ranks = chunks_of_ranks(step)
    pipeline = max(each.compute for each in played)
    updates, gathers = (
        [sum(layer_sum(step.chunks[k], figure) for k in own_chunks) for own_chunks in ranks]
        for figure in ("update_step", "gather_step")
    )
    return _End(pipeline, max(pipeline, *(each.reduced for each in played)), updates, gathers)


def _report(played: list[PlayedRank], end: _End) -> StepReport:
    seconds = end.reduced + max(update + gather for update, gather in zip(end.updates, end.gathers))
    reports = [
        _rank_report(each, seconds=seconds, after_pipeline=end.reduced - end.pipeline, update=update, gather=gather)
        for each, update, gather in zip(played, end.updates, end.gathers)
    ]
    return StepReport(seconds=seconds, pipeline_seconds=end.pipeline, ranks=tuple(reports))


def _continued(step: PipelineStep) -> StepReport:
    """The report of a step that is too long to play.

    The shorter steps have as many micro-batches more than whole rounds of all ranks, down and up, as ``step``.
    """
    rounds = 2 * step.num_ranks
    apart = max(1, MOST_PLAYED // 2 // rounds) * rounds
    first, second = (count * apart + step.num_microbatches % rounds for count in (1, 2))
    times = (step.num_microbatches - second) / apart
    shorter, longer = (_played(replace(step, num_microbatches=count)) for count in (first, second))

    def further(before: float, after: float) -> float:
        return after + (after - before) * times

    seconds = further(shorter.seconds, longer.seconds)
    ranks = []
    for before, after in zip(shorter.ranks, longer.ranks):
        figures = {name: further(value, getattr(after, name)) for name, value in vars(before).items()}
        ranks.append(
            RankReport(**{**figures, "bubble_fraction": figures["bubble_seconds"] / seconds if seconds else 0.0})
        )
    pipeline = further(shorter.pipeline_seconds, longer.pipeline_seconds)
    return StepReport(seconds=seconds, pipeline_seconds=pipeline, ranks=tuple(ranks))


def _rank_report(
    played: PlayedRank, *, seconds: float, after_pipeline: float, update: float, gather: float
) -> RankReport:
    exposed = max(0.0, played.occupied - played.computing) + after_pipeline + gather
    bubble = max(0.0, seconds - played.computing - update - exposed)
    return RankReport(
        compute_seconds=played.computing + update,
        exposed_seconds=exposed,
        bubble_seconds=bubble,
        bubble_fraction=bubble / seconds if seconds else 0.0,
        stall_seconds=max(0.0, played.stalled),
        peak_bytes=played.peak_bytes,
    )


def _bytes_by_action(
    chunks: tuple[ChunkCosts, ...], own_chunks: list[int], program: PipelineActions
) -> list[tuple[float, float]]:
    """Bytes held (while each action runs, after it); the first pair is before all of them."""
    saved = {k: layer_sum(chunks[k], "saved_bytes") for k in own_chunks}
    peaks = {k: peak_bytes(chunks[k]) for k in own_chunks}
    held_bytes = sum(layer_sum(chunks[k], "state_bytes") for k in own_chunks)
    curve = [(held_bytes, held_bytes)]
    for kind, chunk, _ in program.actions:
        if kind == "F":
            held_bytes += saved[chunk]
        running = held_bytes + peaks[chunk]
        if kind == "B" or kind == "W":
            held_bytes -= saved[chunk]
        curve.append((running, held_bytes))
    return curve


def _bytes_over_time(player: Player, curve: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    points = [(0.0, curve[0][0])]
    ends = [played.streams.before for played in player.played[1:]] + [player.compute]
    for played, end, (running, after) in zip(player.played, ends, curve[1:]):
        points += [(played.start, running), (end, after)]
    return tuple(points)


def _events(players: list[Player], end: _End) -> tuple[Event, ...]:
    reduced, updates, gathers, events = end.reduced, end.updates, end.gathers, list[Event]()
    for rank, player in enumerate(players):
        rank_events: list[Event] = []
        record = _recorder(rank, rank_events)
        label = ""
        for action, (index, _, _), (start, streams, pending) in zip(
            player.program.actions, player.program.order, player.played
        ):
            before, label = label, f"{action.kind}{action.chunk}.{action.microbatch}"
            record("receive", label, start, streams.ready)
            play(player.operations[index].tasks, streams, pending, label=label, before=before, record=record)
        if player.pending:
            record("communication", f"reduce {label}", player.reduced() - player.pending, player.reduced())
        record("compute", "update", reduced, reduced + updates[rank])
        record("communication", "gather updated", reduced + updates[rank], reduced + updates[rank] + gathers[rank])
        events += sorted(rank_events, key=lambda event: (event.start, event.end))
    return tuple(events)


def _recorder(rank: int, events: list[Event]) -> Recorder:
    def record(stream: str, label: str, start: float, end: float) -> None:
        if end > start:
            events.append(Event(rank, stream, label, start, end))

    return record
