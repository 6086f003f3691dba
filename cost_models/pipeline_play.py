"""The pipeline's actions played in their order, each rank as far as it can go until it waits for another."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

from cost_models.schedules import Action, actions
from cost_models.step import Chunk
from cost_models.streams import ActionMap, LayerTask, Streams, action_map, layer_tasks


@dataclass(frozen=True)
class Program:
    """One rank's actions: the kinds of action it runs, and each action as (kind's place, waits for, done as).

    ``operations`` lists (kind, chunk, last); ``order`` indexes it. "Waits for" and "done as" index one list of the
    times of all forwards and backwards; −1: nothing.
    """

    actions: tuple[Action, ...]
    operations: tuple[tuple[str, int, bool], ...]
    order: tuple[tuple[int, int, int], ...]


@functools.lru_cache(maxsize=8)
def programs(schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[Program, ...]:
    orders = actions(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    return tuple(_program(order, num_microbatches, num_chunks) for order in orders)


def _program(order: tuple[Action, ...], num_microbatches: int, num_chunks: int) -> Program:
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
    return Program(order, tuple(places), tuple(steps))


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


class Played(NamedTuple):
    """One action as it was played: from when its input was there (then ``streams`` after the receive) to its end."""

    start: float
    streams: Streams
    pending: float
    end: float


class Player:
    """One rank while the step plays: how far it is, and when its streams are free.

    ``occupied`` is the seconds of its actions, waits for communication included; ``first`` when the first one started;
    ``kept`` every action as played, if asked for.
    """

    def __init__(self, chunks: tuple[Chunk, ...], program: Program, *, keep: bool) -> None:
        self.program = program
        self.operations = [_operation(chunks[k], kind, last) for kind, k, last in program.operations]
        self.place = 0
        self.compute = 0.0
        self.communication = 0.0
        self.issue = 0.0
        self.pending = 0.0
        self.occupied = 0.0
        self.first: float | None = None
        self.keep = keep
        self.kept: list[Played] = []

    def compute_seconds(self) -> float:
        """Seconds that the rank computes, all its actions together."""
        return sum(self.operations[operation].compute for operation, _, _ in self.program.order)

    def reduced(self) -> float:
        """When the rank's last gradient reduction is done."""
        return max(self.communication, self.compute) + self.pending

    def stalled(self) -> float:
        """Seconds between its first and its last action in which it waits for other ranks."""
        return self.compute - (self.first or 0.0) - self.occupied

    def advance(self, done: list[float]) -> bool:
        """Run actions until one waits for another rank; ``done`` has the times of all, −1 for not yet."""
        order = self.program.order
        operations = self.operations
        place, compute, issue, pending, occupied = self.place, self.compute, self.issue, self.pending, self.occupied
        begun = place
        if self.first is None and order[0][1] < 0:
            self.first = 0.0
        while place < len(order):
            index, waits_for, done_as = order[place]
            start = compute
            if waits_for >= 0:
                arrival = done[waits_for]
                if arrival < 0.0:
                    break
                if arrival > start:
                    start = arrival
                if self.first is None:
                    self.first = start
            operation = operations[index]
            ready = start + operation.receive
            streams = (ready, compute, self.communication, issue)
            left = pending
            if operation.seconds is not None and not pending:
                compute = ready + operation.seconds
                issue = ready + operation.lead
            else:
                action = operation.map_after(pending)
                compute = _row(action.compute, streams)
                self.communication = _row(action.communication, streams)
                issue = _row(action.issue, streams)
                pending = action.pending
            occupied += compute - start
            if self.keep:
                self.kept.append(Played(start, Streams(*streams), left, compute))
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


def run(players: list[Player], forwards: int) -> None:
    done = [-1.0] * (2 * forwards)
    moved = True
    while moved:
        moved = False
        for player in players:
            moved |= player.advance(done)
    stuck = [rank for rank, player in enumerate(players) if player.place < len(player.program.order)]
    if stuck:
        raise RuntimeError(f"the schedule's orders wait for each other on ranks {stuck}")
