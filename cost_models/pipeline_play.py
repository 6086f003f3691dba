"""The pipeline's actions played in their order, each rank as far as it can go until it waits for another."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

from cost_models.schedules import Action, actions
from cost_models.step import ChunkCosts
from cost_models.streams import NEVER, ActionMap, LayerTask, Row, Streams, action_map, layer_tasks


@dataclass(frozen=True)
class PipelineActions:
    """One rank's actions: the kinds of action it runs, and each action as (kind's place, waits for, done as).

    ``operations`` lists (kind, chunk, last); ``order`` indexes it. "Waits for" and "done as" index one list of the
    times of all forwards and backwards; −1: nothing.
    """

    actions: tuple[Action, ...]
    operations: tuple[tuple[str, int, bool], ...]
    order: tuple[tuple[int, int, int], ...]


@functools.lru_cache(maxsize=4)
def programs(schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[PipelineActions, ...]:
    """Each rank's program, the same for all steps of this shape.

    Raises:
        ValueError: if the schedule cannot run this combination.
    """
    orders = actions(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    return tuple(_program(order, num_microbatches, num_chunks) for order in orders)


def _program(order: tuple[Action, ...], num_microbatches: int, num_chunks: int) -> PipelineActions:
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
    return PipelineActions(order, tuple(places), tuple(steps))


@dataclass(frozen=True)
class Operation:
    """One kind of action of one chunk, ready to play.

    Attributes:
        tasks: its layers.
        receive: seconds to take its input from another rank.
        seconds: from its input to its end, None where communication plays a part in that.
        lead: seconds until its last layer starts, by then the next action's first gather may be under way.
        compute: seconds of its layers alone.
        pending: seconds of the reduction that it leaves.
        maps: as a (max, +) map, by the seconds of the reduction that the previous action left.
    """

    tasks: tuple[LayerTask, ...]
    receive: float
    seconds: float | None
    lead: float
    compute: float
    pending: float
    maps: dict[float, ActionMap] = field(default_factory=dict)

    def map_after(self, pending: float) -> ActionMap:
        """The action as a map, after a reduction of ``pending`` seconds was left by the action before."""
        cached_map = self.maps.get(pending)
        if cached_map is None:
            cached_map = self.maps[pending] = action_map(self.tasks, pending)
        return cached_map

    def rows_after(self, pending: float) -> tuple[Row, Row, Row]:
        """The same without what it leaves."""
        if self.seconds is None or pending:
            return self.map_after(pending)[:3]
        never = (NEVER, NEVER, NEVER)
        return (self.seconds, *never), (NEVER, NEVER, 0.0, NEVER), (self.lead, *never)


def operation(chunk: ChunkCosts, kind: str, last: bool) -> Operation:
    """The operation of one kind of action; ``last``: as in ``layer_tasks``."""
    tasks = layer_tasks(chunk, kind, last=last)
    compute = sum(task.compute for task in tasks)
    alone = not any(task.gather or task.reduce for task in tasks)
    return Operation(
        tasks=tasks,
        receive={"F": chunk.receive_forward, "W": 0.0}.get(kind, chunk.receive_backward),
        seconds=compute if alone else None,
        lead=compute - tasks[-1].compute if tasks else 0.0,
        compute=compute,
        pending=tasks[-1].reduce if tasks else 0.0,
    )


class PlayedRank(NamedTuple):
    """What comes of playing one rank, in seconds and bytes.

    Attributes:
        compute: when its last action is done.
        reduced: when its last gradient reduction is done.
        computing: that it computes.
        occupied: of its actions, waits for communication included.
        stalled: between its first and its last action in which it waits for other ranks.
        peak_bytes: most that it holds.
    """

    compute: float
    reduced: float
    computing: float
    occupied: float
    stalled: float
    peak_bytes: float


class Played(NamedTuple):
    """The state before an action: its input arrived at ``start``; ``streams`` are those after the receive."""

    start: float
    streams: Streams
    pending: float


class Player:
    """One rank while the step plays: its position in the order, and when its streams are free.

    ``occupied`` is the seconds of its actions, waits for communication included; ``first`` when the first one started;
    ``played`` every action as played, if asked for.
    """

    def __init__(self, chunks: tuple[ChunkCosts, ...], program: PipelineActions, *, keep: bool) -> None:
        self.program = program
        self.operations = [operation(chunks[k], kind, last) for kind, k, last in program.operations]
        self.place = 0
        self.compute = 0.0
        self.communication = 0.0
        self.issue = 0.0
        self.pending = 0.0
        self.occupied = 0.0
        self.first: float | None = None
        self.keep = keep
        self.played: list[Played] = []

    def compute_seconds(self) -> float:
        """Seconds that the rank computes, all its actions together."""
        return sum(self.operations[operation].compute for operation, _, _ in self.program.order)

    def reduced(self) -> float:
        """When the rank's last gradient reduction is done."""
        return max(self.communication, self.compute) + self.pending

    def stalled(self) -> float:
        """Seconds between its first and its last action in which it waits for other ranks."""
        return self.compute - (self.first or 0.0) - self.occupied

    def advance(self, ends: list[float]) -> bool:
        """Run actions until one waits for another rank; ``ends`` has the end times of all actions, −1 for not yet."""
        order, operations, keep = self.program.order, self.operations, self.keep
        place, compute, communication, issue = self.place, self.compute, self.communication, self.issue
        pending, occupied = self.pending, self.occupied
        begun = place
        if self.first is None and order[0][1] < 0:
            self.first = 0.0
        while place < len(order):
            index, waits_for, done_as = order[place]
            start = compute
            if waits_for >= 0:
                arrival = ends[waits_for]
                if arrival < 0.0:
                    break
                if arrival > start:
                    start = arrival
                if self.first is None:
                    self.first = start
            operation = operations[index]
            ready = start + operation.receive
            if keep:
                self.played.append(Played(start, Streams(ready, compute, communication, issue), pending))
            busy_until = compute
            if operation.seconds is not None and not pending:
                compute = ready + operation.seconds
                issue = ready + operation.lead
            else:
                (c0, c1, c2, c3), (q0, q1, q2, q3), (s0, s1, s2, s3), pending = operation.map_after(pending)
                compute = max(c0 + ready, c1 + busy_until, c2 + communication, c3 + issue)
                freed = max(q0 + ready, q1 + busy_until, q2 + communication, q3 + issue)
                issue = max(s0 + ready, s1 + busy_until, s2 + communication, s3 + issue)
                communication = freed
            occupied += compute - start
            if done_as >= 0:
                ends[done_as] = compute
            place += 1
        self.place, self.compute, self.communication, self.issue = place, compute, communication, issue
        self.pending, self.occupied = pending, occupied
        return place > begun


def run(players: list[Player], forwards: int) -> None:
    """Play all ranks to the end; ``forwards`` is the number of chunks times micro-batches."""
    ends = [-1.0] * (2 * forwards)
    moved = True
    while moved:
        moved = False
        for player in players:
            moved |= player.advance(ends)
    stuck = [rank for rank, player in enumerate(players) if player.place < len(player.program.order)]
    if stuck:
        raise RuntimeError(f"the schedule's orders wait for each other on ranks {stuck}")
