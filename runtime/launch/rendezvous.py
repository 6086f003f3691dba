"""How processes find each other: at a store that rank 0 keeps, where each one checks in.

Whoever finds out that the job cannot start (a peer missing, two processes of one rank, unequal world sizes) leaves the
reason at the store, so that all end at once and with the same words.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from runtime.launch.place import LaunchError, ProcessPlace

_FINE = "ok"
_VERDICT = "verdict"
#: Seconds that rank 0 keeps the store open so that the others can read why the job does not start.
_FAREWELL_SECONDS = 2.0
#: Seconds between two looks at the store; with thousands of ranks it grows with their number.
_LOOK_SECONDS = (0.01, 0.25)

_HINTS = {
    "arguments": "start every rank with the same address, port and world_size",
    "torchrun": "see whether the launcher runs on every host, with the same address and number of hosts",
    "slurm": "start the script with srun, which starts every task",
}


@dataclass(frozen=True)
class Deadline:
    """A moment ``seconds`` after ``start`` (of the monotonic clock)."""

    seconds: float
    start: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(seconds, time.monotonic())

    @property
    def left(self) -> float:
        """Seconds until then, 0 if it has passed."""
        return max(0.0, self.start + self.seconds - time.monotonic())


def open_store(
    address: str, port: int, *, keeps: bool, waiting: str, deadline: Deadline, keeper: str = "rank 0"
) -> dist.TCPStore:
    """The store at ``address``; with ``keeps`` this process keeps it.

    Args:
        waiting: who asks, for messages.
        keeper: who keeps it, for messages.

    Raises:
        LaunchError: if it cannot be opened, or not be reached before ``deadline``.
    """
    where = f"{address}:{port}"
    if not keeps:
        _await_listener(address, port, waiting=waiting, keeper=keeper, deadline=deadline)
    opened: list[dist.TCPStore] = []
    failed: list[Exception] = []

    def connect() -> None:
        timeout = timedelta(seconds=max(1.0, deadline.left))
        try:
            opened.append(
                dist.TCPStore(
                    address, port, is_master=keeps, timeout=timeout, wait_for_workers=False, multi_tenant=keeps
                )
            )
        except Exception as error:  # told to the waiting thread
            failed.append(error)

    # A listener that never answers would hold this thread for ever: the client has no limit of its own there.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(deadline.left + 1.0)
    if opened:
        return opened[0]
    if failed and "EADDRINUSE" in str(failed[0]):
        raise LaunchError(
            f"{waiting} cannot listen at port {port}: another program uses it; choose another port (the same on all "
            "ranks), or end what is left of an earlier run"
        ) from failed[0]
    reason = f"{failed[0]}" if failed else "it does not answer as a rendezvous: another program may use that port"
    reached = "does not reach itself" if keeps else f"connected to {where}, but found no rendezvous of {keeper}"
    raise LaunchError(f"{waiting} {reached} at {where} within {deadline.seconds:g} s: {reason}") from (
        failed[0] if failed else None
    )


def _await_listener(address: str, port: int, *, waiting: str, keeper: str, deadline: Deadline) -> None:
    """Try to connect until something listens."""
    pause, attempts, seen = 0.05, 0, "nothing"
    while attempts == 0 or deadline.left > 0:
        attempts += 1
        try:
            socket.create_connection((address, port), timeout=max(0.1, min(5.0, deadline.left))).close()
            return
        except OSError as error:
            seen = error.strerror or str(error) or type(error).__name__
        time.sleep(min(pause, deadline.left))
        pause = min(2 * pause, 1.0)
    raise LaunchError(
        f"{waiting} did not reach {keeper} at {address}:{port} within {deadline.seconds:g} s (tried {attempts} times, "
        f"last seen: {seen}): see whether {keeper} runs there, and whether hosts may connect to that port"
    )


def agree_on_meeting(store: dist.Store, place: ProcessPlace, deadline: Deadline) -> str:
    """A name for the keys of those that start together, at a store that earlier ones have used.

    torchrun's agents keep one store over restarts, and nothing in the environment tells one start from another: each
    agent counts the failures of its own processes alone. So every process takes a number that no other has had; those
    that started before cannot have heard of it.

    Raises:
        LaunchError: if not all come before ``deadline``.
    """
    number = str(store.add("meshwright/processes", 1))
    with _store_kept(place):
        return (
            _call_others(store, number, place, deadline) if place.rank == 0 else _hear(store, number, place, deadline)
        )


def _call_others(store: dist.Store, number: str, place: ProcessPlace, deadline: Deadline) -> str:
    """Wait for the numbers of all others, and tell each that it was heard."""
    meeting = f"meshwright/{number}"
    store.set("meshwright/newest", meeting)
    keys = [f"{meeting}/rank/{rank}" for rank in range(1, place.world_size)]
    while not store.check(keys):
        if deadline.left == 0:
            absent = [rank for rank, key in enumerate(keys, start=1) if not store.check([key])]
            raise LaunchError(
                f"{_who(place)}: {ranks(absent)} did not come within {deadline.seconds:g} s. {_HINTS[place.source]}"
            )
        time.sleep(max(_LOOK_SECONDS[0], place.world_size / 10_000))
    store.set(f"{meeting}/members", ",".join([number, *(store.get(key).decode() for key in keys)]))
    return meeting


def _hear(store: dist.Store, number: str, place: ProcessPlace, deadline: Deadline) -> str:
    """Tell rank 0 this process's number until one answers that started with it."""
    meeting, told = "", ""
    while deadline.left > 0:
        if store.check(["meshwright/newest"]):
            meeting = store.get("meshwright/newest").decode()
        if meeting != told:
            store.set(f"{meeting}/rank/{place.rank}", number)
            told = meeting
        if meeting and store.check([f"{meeting}/members"]):
            members = store.get(f"{meeting}/members").decode().split(",")
            if members[place.rank : place.rank + 1] == [number]:
                return meeting
        time.sleep(max(_LOOK_SECONDS[0], place.world_size / 10_000))
    raise LaunchError(
        f"{_who(place)}: rank 0, or another, did not come within {deadline.seconds:g} s. {_HINTS[place.source]}"
    )


def check_in(store: dist.Store, place: ProcessPlace, deadline: Deadline) -> None:
    """Wait until all ranks are there.

    Raises:
        LaunchError: if not all come before ``deadline``, or they contradict each other; on all ranks that came.
    """
    ours, who = _ours(), _who(place)
    with _store_kept(place):
        world_size = store.compare_set("world_size", "", str(place.world_size)).decode()
        holder = store.compare_set(f"rank/{place.rank}", "", ours).decode()
        arrived = store.add("arrived", 1)
        if world_size != str(place.world_size):
            _judge(store, f"{who} expects {place.world_size} processes, the first one to come {world_size}")
        elif holder != ours:
            _judge(store, f"two processes are rank {place.rank}: on {holder} and on {ours}")
        elif arrived == place.world_size:
            _judge(store, _FINE)
        verdict = _await_verdict(store, place, deadline)
        if verdict != _FINE:
            _take_leave(store, place)
    if verdict != _FINE:
        raise LaunchError(f"{who}, rendezvous at {place.address}:{place.port}: {verdict}")


def _ours() -> str:
    return f"{socket.gethostname()} (process {os.getpid()})"


def _who(place: ProcessPlace) -> str:
    return f"rank {place.rank} of {place.world_size} on {_ours()}"


@contextlib.contextmanager
def _store_kept(place: ProcessPlace) -> Iterator[None]:
    """Say so where the store ends while something is asked of it."""
    try:
        yield
    except dist.DistError as error:
        raise LaunchError(
            f"{_who(place)} lost the rendezvous at {place.address}:{place.port} while waiting for its peers: whoever "
            f"kept it has ended ({error})"
        ) from error


def _judge(store: dist.Store, verdict: str) -> None:
    store.compare_set(_VERDICT, "", verdict)  # the first one counts


def _await_verdict(store: dist.Store, place: ProcessPlace, deadline: Deadline) -> str:
    pause, slowest = _LOOK_SECONDS
    slowest = max(slowest, place.world_size / 10_000)
    while not store.check([_VERDICT]):
        # Rank 0 counts who is missing; another one only if rank 0 does not.
        if deadline.left == 0 and (place.rank == 0 or _overdue(deadline)):
            _judge(store, _missing(store, place, deadline))
        time.sleep(pause)
        pause = min(1.5 * pause, slowest)
    return store.get(_VERDICT).decode()


def _overdue(deadline: Deadline) -> bool:
    return time.monotonic() > deadline.start + deadline.seconds + _FAREWELL_SECONDS / 2


def _missing(store: dist.Store, place: ProcessPlace, deadline: Deadline) -> str:
    there = [rank for rank in range(place.world_size) if store.check([f"rank/{rank}"])]
    absent = sorted(set(range(place.world_size)) - set(there))
    hosts: dict[str, list[int]] = {}
    for rank in there:
        hosts.setdefault(store.get(f"rank/{rank}").decode().partition(" ")[0], []).append(rank)
    seen = [f"{ranks(numbers)} on {host}" for host, numbers in hosts.items()]
    shown = "; ".join(seen[:8]) + (f"; {len(seen) - 8} more hosts" if len(seen) > 8 else "")
    return f"{ranks(absent)} did not come within {deadline.seconds:g} s; here are {shown}. {_HINTS[place.source]}"


def _take_leave(store: dist.Store, place: ProcessPlace) -> None:
    """Tell that the verdict has been read; rank 0, who may keep the store, waits until all have."""
    store.add("read", 1)
    farewell = Deadline.after(_FAREWELL_SECONDS)
    while place.rank == 0 and farewell.left and store.add("read", 0) < store.add("arrived", 0):
        time.sleep(0.02)


def ranks(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` as ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {listed}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {listed}"
