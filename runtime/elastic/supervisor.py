"""Starts the processes of a job on a host, says at the store when one is gone, and starts another in its place."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist

from runtime.elastic.job_rounds import Leader, announce

#: Seconds between two looks at the processes.
LOOK_SECONDS = 0.05


class Started(Protocol):
    """A process: ``subprocess.Popen``."""

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


class Supervisor:
    """The processes of one host.

    Args:
        store: of the job.
        start: starts a process, given its number in the job and its place on this host.
        num_processes: how many run at a time.
        max_restarts: how often a process that was lost is started anew, all together.
        leader: of the job, where this host has it.
        on_loss: told what happened, in words.
    """

    def __init__(
        self,
        store: dist.Store,
        start: Callable[[int, int], Started],
        *,
        num_processes: int,
        max_restarts: int,
        leader: Leader | None,
        on_loss: Callable[[str], None],
    ) -> None:
        self._store, self._start, self._leader, self._on_loss = store, start, leader, on_loss
        self._restarts_left = max_restarts
        self._running: dict[int, tuple[int, Started]] = {}
        self._code, self._code_at_end = 0, 0
        for place in range(num_processes):
            self._start_at(place)

    def run(self) -> int:
        """Look after them until all have ended.

        Returns:
            0 if the training came to its end and nothing failed behind it, else the code of a process that failed.
        """
        try:
            while self._running:
                for number, (place, process) in list(self._running.items()):
                    code = process.poll()
                    if code is not None:
                        del self._running[number]
                        self._note_end(number, place, code)
                if self._leader is not None:
                    self._leader.look()
                    needed = self._leader.needed
                    is_short = 0 < len(self._running) < needed and not self._restarts_left
                    # Behind the end of the training they leave one by one.
                    if is_short and not self._store.check(["finished"]):
                        self._on_loss(f"fewer than the {needed} processes that it takes are left: they are ended")
                        break
                time.sleep(LOOK_SECONDS)
        finally:
            for _, process in self._running.values():
                process.kill()
        return self._code_at_end if self._store.check(["finished"]) else self._code

    def _note_end(self, number: int, place: int, code: int) -> None:
        if self._store.check(["finished"]):
            self._code_at_end = self._code_at_end or (code if code >= 0 else 128 - code)
            return
        announce(self._store, "departure", number)
        self._code = code if code > 0 else 128 - code if code else 1
        starts_anew = code != 0 and self._restarts_left > 0 and not self._store.check(["given up"])
        self._on_loss(
            f"process {number} ended with {code}"
            + (f"; another is started, {self._restarts_left - 1} more may be" if starts_anew else "")
        )
        if starts_anew:
            self._restarts_left -= 1
            self._start_at(place)

    def _start_at(self, place: int) -> None:
        number = self._store.add("processes", 1)
        self._running[number] = place, self._start(number, place)
