"""Recordings with one change on one rank that breaks a rule of ``tests.communication.rules``; made when called."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.communication.recorder import Call
from tests.communication.rules import communicator

#: What every rank issued, by rank.
Recording = list[list[Call]]
Mutants = Iterator[Callable[[], Recording]]


def swapped(calls: Recording) -> Mutants:
    """Two collectives of a group, one after the other, change places."""
    for rank, own in enumerate(calls):
        latest: dict[str, int] = {}
        for number, call in enumerate(own):
            if call.peer >= 0:
                continue
            before = latest.get(call.group, number)
            if (own[before].kind, own[before].tensors) != (call.kind, call.tensors):
                yield functools.partial(_replaced, calls, rank, {before: call, number: own[before]})
            latest[call.group] = number


def left_out(calls: Recording) -> Mutants:
    """A call is missing."""
    for rank, own in enumerate(calls):
        for number in range(len(own)):
            yield functools.partial(_reordered, calls, rank, [n for n in range(len(own)) if n != number])


def on_another_communicator(calls: Recording) -> Mutants:
    """A transfer leaves its batch, or gets one; a collective is of another group of the same ranks."""
    for rank, own in enumerate(calls):
        for number, call in enumerate(own):
            change = {"group": f"beside {call.group}"} if call.peer < 0 else {"batch": -1 if call.batch >= 0 else 10**6}
            yield functools.partial(_replaced, calls, rank, {number: replace(call, **change)})


def of_another_shape(calls: Recording) -> Mutants:
    """A tensor has three times the elements."""
    for rank, own in enumerate(calls):
        for number, call in enumerate(own):
            if call.tensors:
                (shape, dtype), *others = call.tensors
                other = replace(call, tensors=(((*shape, 3), dtype), *others))
                yield functools.partial(_replaced, calls, rank, {number: other})


def waiting_in_a_circle(calls: Recording) -> Mutants:
    """The receiver of what is sent after a collective comes to the collective only once it has received."""
    place, number_at = _places(calls)
    for sender, own in enumerate(calls):
        waited: list[int] = []
        for number, call in enumerate(own):
            waited += call.after
            shared = [n for n in waited if own[n].peer < 0 and call.peer in own[n].members]
            if call.kind == "send" and shared:
                collective = number_at[call.peer, *place[sender, max(shared)]]
                receive = number_at[call.peer, *place[sender, number]]
                between = calls[call.peer][collective:receive]
                stream = communicator(call.peer, calls[call.peer][receive])
                if collective < receive and all(communicator(call.peer, one) != stream for one in between):
                    yield functools.partial(_received_before, calls, call.peer, receive, collective)


def _places(calls: Recording) -> tuple[dict[tuple[int, int], tuple[Any, int]], dict[tuple[Any, ...], int]]:
    """(rank, number) → (what pairs up with it on other ranks, which of those it is), and back."""
    place: dict[tuple[int, int], tuple[Any, int]] = {}
    number_at: dict[tuple[Any, ...], int] = {}
    for rank, own in enumerate(calls):
        count: dict[Any, int] = defaultdict(int)
        for number, call in enumerate(own):
            ends = (rank, call.peer) if call.kind == "send" else (call.peer, rank)
            key = communicator(rank, call), ends if call.peer >= 0 else ()
            place[rank, number] = key, count[key]
            number_at[rank, key, count[key]] = number
            count[key] += 1
    return place, number_at


def _replaced(calls: Recording, rank: int, by_number: dict[int, Call]) -> Recording:
    own = [by_number.get(number, call) for number, call in enumerate(calls[rank])]
    return [*calls[:rank], own, *calls[rank + 1 :]]


def _reordered(calls: Recording, rank: int, order: list[int]) -> Recording:
    """The rank issues the calls of these numbers, in this order."""
    new = {number: place for place, number in enumerate(order)}
    own = []
    for place, number in enumerate(order):
        waited = (new[n] for n in calls[rank][number].after if n in new)
        own.append(replace(calls[rank][number], after=tuple(n for n in waited if n < place)))
    return [*calls[:rank], own, *calls[rank + 1 :]]


def _received_before(calls: Recording, rank: int, receive: int, collective: int) -> Recording:
    order = list(range(len(calls[rank])))
    order.insert(collective, order.pop(receive))
    moved = _reordered(calls, rank, order)
    behind = moved[rank][collective + 1]
    moved[rank][collective + 1] = replace(behind, after=(*behind.after, collective))
    return moved
