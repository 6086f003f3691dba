"""A training step played event by event: each rank's compute and communication stream, and what waits for what.

Each rank runs its actions in the schedule's order (``cost_models.schedules``). A forward waits for the chunk before, a
backward for the chunk after; the receiver then takes ``receive_forward`` or ``receive_backward`` seconds, in which it
computes nothing, while the sender goes on. Inside an action the layers play on the two streams
(``cost_models.streams``). The last gradients of each chunk are reduced over the data axis layer by layer, behind
what is still to compute. The optimizer starts when every rank's gradients are there, since their norm is clipped over
all of them; then updated parameters are gathered.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

from cost_models.schedules import Action, actions
from cost_models.step import Chunk, PipelineStep
from cost_models.step_time import chunks_of_ranks, layer_sum
from cost_models.streams import ActionMap, LayerTask, Streams, action_map, layer_tasks, play


class Event(NamedTuple):
    """One stretch of the timeline, in seconds from the start of the step.

    ``stream`` is "compute", "communication" (parameters and gradients over the data axis) or "receive". Labels name
    actions as kind, chunk and micro-batch: ``F3.7``.
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
        peak_bytes: most bytes held: state, saved activations in flight, the running chunk's largest peak.
    """

    compute_seconds: float
    exposed_seconds: float
    bubble_seconds: float
    bubble_fraction: float
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
        ValueError: if the schedule cannot run this many chunks and micro-batches.
    """
    shape = (step.schedule, step.num_ranks, step.num_microbatches, len(step.chunks))
    ranks = chunks_of_ranks(step)
    programs = _programs(*shape)
    players = [_Player(step.chunks, program, keep=timeline or memory) for program in programs]
    _run(players, len(step.chunks) * step.num_microbatches)

    pipeline = max(player.compute for player in players)
    reduced = max(pipeline, *(player.reduced() for player in players))
    updates = [sum(layer_sum(step.chunks[k], "update_step") for k in mine) for mine in ranks]
    gathers = [sum(layer_sum(step.chunks[k], "gather_step") for k in mine) for mine in ranks]
    seconds = reduced + max(update + gather for update, gather in zip(updates, gathers))

    reports = []
    curves = []
    for player, mine, update, gather in zip(players, ranks, updates, gathers):
        curve = _bytes_by_action(step.chunks, mine, player.program)
        computing = player.compute_seconds() + update
        exposed = player.occupied + update - computing + (reduced - pipeline) + gather
        bubble = max(0.0, seconds - computing - exposed)
        reports.append(
            RankReport(
                compute_seconds=computing,
                exposed_seconds=max(0.0, exposed),
                bubble_seconds=bubble,
                bubble_fraction=bubble / seconds if seconds else 0.0,
                peak_bytes=max(running for running, _ in curve),
            )
        )
        if memory:
            curves.append(_bytes_over_time(step.chunks, mine, player, curve))
    return StepReport(
        seconds=seconds,
        pipeline_seconds=pipeline,
        ranks=tuple(reports),
        timeline=_events(players, reduced, updates, gathers) if timeline else None,
        memory=tuple(curves) if memory else None,
    )


def mfu(*, flops: float, seconds: float, num_devices: int, peak_flops: float) -> float:
    """Model flops utilisation: the model's flops of one step over what the devices could do in ``seconds``."""
    return flops / (seconds * num_devices * peak_flops)


@dataclass(frozen=True)
class _Program:
    """One rank's actions: the kinds of action it runs, and each action as (kind's place, waits for, done as).

    ``operations`` lists (kind, chunk, last); ``order`` indexes it. "Waits for" and "done as" index one list of the
    times of all forwards and backwards; −1: nothing.
    """

    actions: tuple[Action, ...]
    operations: tuple[tuple[str, int, bool], ...]
    order: tuple[tuple[int, int, int], ...]


@functools.lru_cache(maxsize=8)
def _programs(schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[_Program, ...]:
    orders = actions(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    return tuple(_program(order, num_microbatches, num_chunks) for order in orders)


def _program(order: tuple[Action, ...], num_microbatches: int, num_chunks: int) -> _Program:
    last_gradients = {action.chunk: place for place, action in enumerate(order) if action.kind in "BW"}
    places: dict[tuple[str, int, bool], int] = {}
    steps = []
    for place, (kind, chunk, microbatch) in enumerate(order):
        operation = (kind, chunk, kind in "BW" and last_gradients[chunk] == place)
        waits_for = done_as = -1
        if kind == "F":
            done_as = chunk * num_microbatches + microbatch
            waits_for = done_as - num_microbatches if chunk else -1
        elif kind != "W":
            done_as = (num_chunks + chunk) * num_microbatches + microbatch
            waits_for = done_as + num_microbatches if chunk < num_chunks - 1 else -1
        steps.append((places.setdefault(operation, len(places)), waits_for, done_as))
    return _Program(order, tuple(places), tuple(steps))


@dataclass(frozen=True)
class _Operation:
    """One kind of action of one chunk, ready to play.

    ``seconds`` and ``lead`` (until its last layer starts) are None where communication plays a part.
    """

    tasks: tuple[LayerTask, ...]
    receive: float
    seconds: float | None
    lead: float
    compute: float
    maps: dict[float, ActionMap] = field(default_factory=dict)

    def map_after(self, pending: float) -> ActionMap:
        """The action as a map, after a reduction of ``pending`` seconds was left by the action before."""
        if pending not in self.maps:
            self.maps[pending] = action_map(self.tasks, pending)
        return self.maps[pending]


def _operation(chunk: Chunk, kind: str, last: bool) -> _Operation:
    tasks = layer_tasks(chunk, kind, last=last)
    compute = sum(task.compute for task in tasks)
    alone = not any(task.gather or task.reduce for task in tasks)
    return _Operation(
        tasks=tasks,
        receive={"F": chunk.receive_forward, "W": 0.0}.get(kind, chunk.receive_backward),
        seconds=compute if alone else None,
        lead=compute - tasks[-1].compute if tasks else 0.0,
        compute=compute,
    )


class _Player:
    """One rank while the step plays: how far it is, and when its streams are free."""

    def __init__(self, chunks: tuple[Chunk, ...], program: _Program, *, keep: bool) -> None:
        self.program = program
        self.operations = [_operation(chunks[k], kind, last) for kind, k, last in program.operations]
        self.place = 0
        self.compute = 0.0
        self.communication = 0.0
        self.issue = 0.0
        self.pending = 0.0
        self.occupied = 0.0
        self.kept: list[tuple[float, Streams, float, float]] | None = [] if keep else None

    def compute_seconds(self) -> float:
        """Seconds that the rank computes, all its actions together."""
        return sum(self.operations[operation].compute for operation, _, _ in self.program.order)

    def reduced(self) -> float:
        """When the rank's last gradient reduction is done."""
        return max(self.communication, self.compute) + self.pending

    def advance(self, done: list[float]) -> bool:
        """Run actions until one waits for another rank; ``done`` has the times of all, −1 for not yet."""
        order = self.program.order
        operations = self.operations
        place, compute, issue, pending, occupied = self.place, self.compute, self.issue, self.pending, self.occupied
        begun = place
        while place < len(order):
            index, waits_for, done_as = order[place]
            start = compute
            if waits_for >= 0:
                arrival = done[waits_for]
                if arrival < 0.0:
                    break
                if arrival > start:
                    start = arrival
            operation = operations[index]
            ready = start + operation.receive
            if self.kept is not None:
                self.kept.append((start, Streams(ready, compute, self.communication, issue), pending, 0.0))
            if operation.seconds is not None and not pending:
                compute = ready + operation.seconds
                issue = ready + operation.lead
            else:
                streams = (ready, compute, self.communication, issue)
                action = operation.map_after(pending)
                compute = _row(action.compute, streams)
                self.communication = _row(action.communication, streams)
                issue = _row(action.issue, streams)
                pending = action.pending
            occupied += compute - start
            if self.kept is not None:
                self.kept[-1] = (*self.kept[-1][:3], compute)
            if done_as >= 0:
                done[done_as] = compute
            place += 1
        self.place, self.compute, self.issue, self.pending, self.occupied = place, compute, issue, pending, occupied
        return place > begun


def _row(coefficients: tuple[float, ...], streams: tuple[float, float, float, float]) -> float:
    return max(
        coefficients[0] + streams[0],
        coefficients[1] + streams[1],
        coefficients[2] + streams[2],
        coefficients[3] + streams[3],
    )


def _run(players: list[_Player], forwards: int) -> None:
    done = [-1.0] * (2 * forwards)
    moved = True
    while moved:
        moved = False
        for player in players:
            moved |= player.advance(done)
    stuck = [rank for rank, player in enumerate(players) if player.place < len(player.program.order)]
    if stuck:
        raise RuntimeError(f"the schedule's orders wait for each other on ranks {stuck}")


def _bytes_by_action(chunks: tuple[Chunk, ...], mine: list[int], program: _Program) -> list[tuple[float, float]]:
    """Bytes held (while each action runs, after it)."""
    saved = {k: layer_sum(chunks[k], "saved_bytes") for k in mine}
    peaks = {k: max((layer.peak_bytes for layer, _ in chunks[k].layers), default=0.0) for k in mine}
    held = sum(layer_sum(chunks[k], "state_bytes") for k in mine)
    curve = []
    for kind, chunk, _ in program.actions:
        if kind == "F":
            held += saved[chunk]
        running = held + peaks[chunk]
        if kind in "BW":
            held -= saved[chunk]
        curve.append((running, held))
    return curve


def _bytes_over_time(
    chunks: tuple[Chunk, ...], mine: list[int], player: _Player, curve: list[tuple[float, float]]
) -> tuple[tuple[float, float], ...]:
    state = sum(layer_sum(chunks[k], "state_bytes") for k in mine)
    points = [(0.0, state)]
    for (start, _, _, end), (running, after) in zip(player.kept or (), curve):
        points += [(start, running), (end, after)]
    return tuple(points)


def _events(players: list[_Player], reduced: float, updates: list[float], gathers: list[float]) -> tuple[Event, ...]:
    events = []
    for rank, player in enumerate(players):
        mine: list[Event] = []

        def record(stream: str, label: str, start: float, end: float, rank: int = rank) -> None:
            if end > start:
                mine.append(Event(rank, stream, label, start, end))  # noqa: B023

        for action, (index, _, _), (start, streams, pending, _) in zip(
            player.program.actions, player.program.order, player.kept or ()
        ):
            label = f"{action.kind}{action.chunk}.{action.microbatch}"
            record("receive", label, start, streams.ready)
            play(player.operations[index].tasks, streams, pending, label=label, record=record)
        if player.pending:
            record("communication", "reduce at the end", player.reduced() - player.pending, player.reduced())
        record("compute", "update", reduced, reduced + updates[rank])
        record("communication", "gather updated", reduced + updates[rank], reduced + updates[rank] + gathers[rank])
        events += sorted(mine, key=lambda event: (event.start, event.end))
    return tuple(events)
