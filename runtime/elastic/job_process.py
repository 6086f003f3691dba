"""A process among those that come and go: it meets the others in rounds, and hears at once when one of them is gone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from runtime.elastic.job_rounds import MEMBER_VARIABLE, STORE_VARIABLE, News, Round, announce
from runtime.launch.process import Process, init_in_round
from runtime.torch_compat.connections import can_close_connections, close_recorded, record_connections, recorded

#: Seconds between two looks at the store.
LOOK_SECONDS = 0.1
#: Seconds within which processes that have met must connect.
CONNECT_SECONDS = 60.0
#: Seconds that an error of a connection waits for the word that a process is gone.
WORD_SECONDS = 15.0


class Superseded(RuntimeError):
    """A member of the round left while the others met: a later round takes its place."""


class TrainingFinished(RuntimeError):
    """Others have come to the end of the training, and meet nobody any more."""


class JobProcess:
    """This process.

    Args:
        environment: of the process, which its supervisor has set.
        collective_timeout: seconds that a collective waits for a peer that is there.

    Attributes:
        round: that it takes part in; None before the first.

    Raises:
        ValueError: if no supervisor has started the process, or the system does not tell of connections.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ, *, collective_timeout: float = 1800.0) -> None:
        address = environment.get(STORE_VARIABLE)
        if address is None:
            raise ValueError(
                "nobody looks after the processes of this job: start it with 'planner run --elastic MIN --nproc N "
                "script.py', which starts a process anew when one is lost"
            )
        if not can_close_connections():
            raise ValueError("elastic training closes connections to lost processes, which it can do on Linux only")
        record_connections()
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self.number = int(environment[MEMBER_VARIABLE])
        self.local_rank = int(environment.get("LOCAL_RANK", "0"))
        self._collective_timeout = collective_timeout
        self._store = self._client()
        self.round: Round | None = None
        self._lost = threading.Event()
        self._between_rounds = threading.Lock()
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look_out, args=(self._client(),), daemon=True)
        self._watch.start()

    @property
    def is_late(self) -> bool:
        """Whether the job runs already."""
        return Round.newest(self._store) is not None

    def arrive(self) -> None:
        """Say that this process is ready: the next round has it among its members."""
        announce(self._store, "arrival", self.number)

    def finish(self) -> None:
        """Say that the training has come to its end."""
        self._store.set("finished", "")

    def give_up(self) -> None:
        """Say that the training cannot go on, whoever comes."""
        self._store.set("given up", "")

    @property
    def is_finished(self) -> bool:
        """Whether any process has said that the training has come to its end."""
        return bool(self._store.check(["finished"]))

    def newer_round(self) -> Round | None:
        """A later round than the present one, with this process in it."""
        newest = Round.newest(self._store)
        if newest is None or self.number not in newest.members or (self.round is not None and newest == self.round):
            return None
        return newest

    def heard_of_a_loss(self, error: BaseException) -> bool:
        """Whether an error is because a member of the present round is gone: waits for the word if it may be."""
        end = time.monotonic() + (WORD_SECONDS if isinstance(error, RuntimeError) else 0.0)
        while not self._lost.wait(LOOK_SECONDS):
            if time.monotonic() > end:
                return False
        return True

    def meet(self) -> Process:
        """Join the group of the newest round, once all its members have come; it may be the first for this process.

        Raises:
            TrainingFinished: if one that has come to the end of the training will not come.
        """
        while not self.is_finished:
            newest = self.newer_round()
            if newest is not None:
                try:
                    return self._meet(newest)
                except Superseded:
                    continue
            time.sleep(LOOK_SECONDS)
        raise TrainingFinished("the training has come to its end")

    def _meet(self, newest: Round) -> Process:
        number, rank = newest.number, newest.members.index(self.number)
        self._store.set(f"met/{number}/{self.number}", "")
        everyone = [f"met/{number}/{member}" for member in newest.members]
        while not self._store.check([f"decision/{number}"]):
            if self._store.check(everyone):
                self._store.compare_set(f"decision/{number}", "", "go")
            elif self.is_finished:
                raise TrainingFinished("the training has come to its end")
            elif Round.newest(self._store) != newest:
                self._store.compare_set(f"decision/{number}", "", "skip")
            else:
                time.sleep(LOOK_SECONDS / 10)
        if self._store.get(f"decision/{number}") != b"go":
            raise Superseded
        # Nobody is in a collective of the last round any more.
        with self._between_rounds:
            close_recorded()
            self.round = newest
            self._lost.clear()
        try:
            with recorded():
                return init_in_round(
                    dist.PrefixStore(f"group/{number}", self._client()),
                    rank=rank,
                    world_size=len(newest.members),
                    local_rank=self.local_rank,
                    timeout=CONNECT_SECONDS,
                    collective_timeout=self._collective_timeout,
                )
        except RuntimeError as error:
            if self.heard_of_a_loss(error):
                raise Superseded from error
            raise

    def _look_out(self, store: dist.Store) -> None:
        """Close the connections of the present round as soon as one of its members is gone.

        Not only when there is a round without it: while fewer than the least are left there is none.
        """
        departures, gone = News(store, "departure"), set[int]()
        try:
            while not self._ended.wait(LOOK_SECONDS):
                gone.update(departures.since_last_time())
                with self._between_rounds:
                    if self.round is not None and not gone.isdisjoint(self.round.members):
                        self._lost.set()
                        # At each look: a group that was being made may have connected since.
                        close_recorded()
        except RuntimeError:
            close_recorded()  # the store has ended, and with it the job

    def leave(self) -> None:
        """Look out no more."""
        self._ended.set()
        self._watch.join()

    def _client(self) -> dist.TCPStore:
        return dist.TCPStore(
            self._host, self._port, is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS), wait_for_workers=False
        )
