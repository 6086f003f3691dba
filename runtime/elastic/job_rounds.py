"""Rounds of a job whose processes come and go: each round is a list of members, kept at a store that outlives them.

Who starts processes (``Supervisor``) says who is gone, processes say when they are ready, and the leader makes a new
round of every change:

    arrivals, arrival/n       how many processes have come to be ready, and their numbers
    departures, departure/n   how many have ended without having finished, and their numbers
    rounds, round/n           how many rounds there were, and their members' numbers in the order of ranks
    met/round/member          who has come to a round, before its process group is made
    decision/round            "go" once all have, or "skip" if one left for a later round
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.distributed as dist

#: Where processes find the store, and their own number: set by who starts them.
STORE_VARIABLE, MEMBER_VARIABLE = "MESHWRIGHT_ELASTIC_STORE", "MESHWRIGHT_ELASTIC_MEMBER"


@dataclass(frozen=True)
class Round:
    """``members`` take part, the first of them as rank 0."""

    number: int
    members: tuple[int, ...]

    @staticmethod
    def newest(store: dist.Store) -> Round | None:
        """The last round that the leader made; None before the first."""
        number = store.add("rounds", 0)
        return Round(number, tuple(json.loads(store.get(f"round/{number}")))) if number else None

    def lost(self, later: Round) -> bool:
        """Whether a member is no more in a later round."""
        return not set(self.members) <= set(later.members)


def announce(store: dist.Store, what: str, member: int) -> None:
    """Say that a process has come to be ready (``"arrival"``), or is gone (``"departure"``)."""
    number = store.add(f"{what}s taken", 1)
    store.set(f"{what}/{number}", str(member))
    store.add(f"{what}s", 1)


class News:
    """Who has come (``"arrival"``), or is gone (``"departure"``), each told once."""

    def __init__(self, store: dist.Store, what: str) -> None:
        self._store, self._what, self._seen = store, what, 0

    def since_last_time(self) -> Iterator[int]:
        """Numbers of the processes, in the order in which that was announced."""
        while self._store.check([f"{self._what}/{self._seen + 1}"]):
            self._seen += 1
            yield int(self._store.get(f"{self._what}/{self._seen}"))


@dataclass
class Leader:
    """Makes the rounds.

    Args:
        store: of the job.
        first: how many processes the first round waits for.
        least: how many a later one needs at least.
    """

    store: dist.Store
    first: int
    least: int
    _present: list[int] = field(default_factory=list)
    _number: int = 0
    _members: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._arrivals, self._departures = (News(self.store, what) for what in ("arrival", "departure"))

    def look(self) -> None:
        """Take up who has come and gone since the last time; make a round if that changes the members."""
        # Who came last stands last: ranks keep their order.
        self._present += [one for one in self._arrivals.since_last_time() if one not in self._present]
        gone = set(self._departures.since_last_time())
        self._present = [member for member in self._present if member not in gone]
        if len(self._present) >= self.needed and tuple(self._present) != self._members:
            self._number, self._members = self._number + 1, tuple(self._present)
            self.store.set(f"round/{self._number}", json.dumps(self._members))
            self.store.add("rounds", 1)

    @property
    def needed(self) -> int:
        """How many processes the next round needs."""
        return self.least if self._number else self.first
