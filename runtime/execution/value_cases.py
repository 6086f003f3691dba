"""Which of a call's programs is right for its values, where the model's Python code reads values.

A graph that was captured with readings (``mask.sum().item() == 7``) has guards. The graphs of one kind of call are its
cases; each call is of the first case whose guards hold on its inputs, on all ranks alike, or of a new one.

Where a new one differs from another in nothing but how many rows masks pick, the lines that pick them are remembered:
from then on the model is captured for any number of rows there, if it can be, and such a case takes the other's place.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from passes.capture.guard_values import differences, first_difference
from passes.ir.errors import CaptureError, MissingValues
from passes.ir.graph import Graph
from passes.ir.value_guards import Path, ValueGuards
from runtime.agreement.ranks_together import Ranks

#: Cases of one kind of call that are remembered.
MAX_CASES = 64
#: Ways to pass a call whose kind is remembered.
_MAX_SPELLINGS = 1024
#: Cases at which a user is told that values change from call to call.
CASES_ANNOUNCED = 8
#: What makes one program of many, for a count and for the place in a queue that the next rows are written to.
_AS_A_TENSOR = (
    "keep it a tensor (without .item(), int(), tolist()): rows are written to a queue by "
    "queue[(pointer + torch.arange(len(rows))) % len(queue)] = rows, and pointer.add_(len(rows)).remainder_(len(queue))"
)

log = logging.getLogger("meshwright.programs")


@dataclass
class CallValues:
    """Values of the inputs of a call on its global batch, as far as they were needed.

    Args:
        own: what this rank passes, by path.
        whole: gives an input of all data ranks from this rank's samples; every rank must call it.
    """

    own: Mapping[Path, torch.Tensor]
    whole: Callable[[Path], torch.Tensor] | None = None
    _gathered: dict[Path, torch.Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> Mapping[Path, torch.Tensor]:
        """Inputs by path; of a call with each rank's own samples, those that were gathered."""
        return self.own if self.whole is None else self._gathered

    def gather(self, paths: Sequence[Path]) -> bool:
        """Gather inputs that are not yet there; whether there were any that could be."""
        missing = [path for path in paths if path not in self._gathered and path in self.own]
        if self.whole is None or not missing:
            return False
        self._gathered.update({path: self.whole(path) for path in missing})
        return True


class ValueCases:
    """Cases by kind of call.

    Args:
        ranks: which must all come to the same case.
        buffers: the model's buffers by name, whole.
    """

    def __init__(self, ranks: Ranks, buffers: Mapping[str, torch.Tensor]) -> None:
        self.buffers = dict(buffers)
        self._ranks = ranks
        self._cases: dict[Hashable, OrderedDict[int, ValueGuards]] = {}
        self._kinds: dict[Hashable, Hashable] = {}
        self._next: dict[Hashable, int] = {}
        self._announced: set[str] = set()
        self._any_number_at: frozenset[str] = frozenset()
        self._outgrown: dict[Hashable, int] = {}
        #: Mode → lines at which programs are for any number, and sets of lines at which they cannot be.
        self._captured: dict[Hashable, frozenset[str]] = {}
        self._refused: set[tuple[Hashable, frozenset[str]]] = set()

    @property
    def buffers_read(self) -> tuple[str, ...]:
        """The buffers that any guard reads."""
        return tuple(dict.fromkeys(name for guards in self._all() for name in guards.buffers))

    @property
    def inputs_read(self) -> frozenset[str]:
        """Names of the inputs that any guard reads, which every rank must pass."""
        return frozenset(str(path[0]) for guards in self._all() for path in guards.input_paths)

    @property
    def read_values(self) -> bool:
        """Whether any guard reads inputs or buffers."""
        return bool(self.inputs_read or self.buffers_read)

    def _all(self) -> list[ValueGuards]:
        return [guards for cases in self._cases.values() for guards in cases.values()]

    def note(self, spelling: Hashable, kind: Hashable) -> Hashable:
        """Remember the kind of calls that are passed in one way; it."""
        if len(self._kinds) >= _MAX_SPELLINGS:
            self._kinds.clear()
        self._kinds[spelling] = kind
        return kind

    def plain_case(self, spelling: Hashable) -> int | None:
        """The case of all calls passed in this way, if none of their values is read; None if they were not captured."""
        cases = self._cases.get(self._kinds.get(spelling))
        return next(reversed(cases)) if cases and not any(cases.values()) else None

    def case_of(self, kind: Hashable, values: CallValues) -> int | None:
        """Number of the case that a call belongs to, the same on all ranks; None if it is a new one.

        Raises:
            ValueError: on every rank, if they come to different cases.
        """
        cases = self._cases.get(kind)
        if cases is None:
            return None
        values.gather(list(dict.fromkeys(path for guards in cases.values() for path in guards.input_paths)))
        number, reason = None, ""
        for candidate, guards in reversed(cases.items()):
            difference = self._difference(guards, values)
            if difference is None:
                number = candidate
                break
            reason = difference
        self._agree(number, reason)
        if number is None:
            self._note_counts(kind, values)
        else:
            cases.move_to_end(number)
        return number

    def _note_counts(self, kind: Hashable, values: CallValues) -> None:
        """Remember the lines at which a call's masks pick other numbers of rows, if a case differs in these alone."""
        for number, guards in reversed(self._cases[kind].items()):
            with contextlib.suppress(KeyError):  # an input that is not passed
                readings = [reading for reading, _ in differences(guards, values.tensors, self.buffers)]
                if all(reading in guards.counts for reading in readings):
                    self._any_number_at |= {reading.place for reading in readings}
                    self._outgrown[kind] = number
                    return

    def captured(self, mode: Hashable, capture: Callable[..., Graph]) -> Graph:
        """``capture()``, for any number of rows at the lines where it has changed, as far as that can be.

        Args:
            mode: calls that are captured alike.
            capture: of ``passes.capture``, with its option ``any_number_at``.
        """
        for places in dict.fromkeys((self._any_number_at, self._captured.get(mode, frozenset()))):
            if not places or (mode, places) in self._refused:
                continue
            try:
                graph = capture(any_number_at=places)
            except CaptureError as error:
                self._refused.add((mode, places))
                log.info("a program for each number of rows that masks pick: for any number, %s", error)
            else:
                self._captured[mode] = places
                log.info("a program for any number of rows that masks pick, which computes all, in %s", _listed(places))
                return graph
        return capture()

    def _difference(self, guards: ValueGuards, values: CallValues) -> str | None:
        try:
            difference = first_difference(guards, values.tensors, self.buffers)
        except KeyError as missing:
            return f"input {missing} is not passed, but read in Python"
        if difference is None:
            return None
        reading, value = difference
        return f"in {reading.place}: {apart(value, reading.expected)}"

    def _agree(self, number: int | None, reason: str) -> None:
        answers = self._ranks.gathered((number, reason))
        apart = [place for place, (other, _) in enumerate(answers) if other != answers[0][0]]
        if apart:
            reasons = answers[apart[0]][1] or answers[0][1]
            raise ValueError(
                f"{self._ranks.names([0])} and {self._ranks.names(apart)} read different values ({reasons}): every "
                "rank must pass the same global batch, and at least the inputs in its parallel.needed_inputs"
            )

    def next_number(self, kind: Hashable) -> int:
        """The number for a new case: of a kind's first one it is 0, and none is given twice."""
        return self._next.get(kind, 0)

    def add(self, kind: Hashable, number: int, guards: ValueGuards) -> None:
        """Remember a new case."""
        cases = self._cases.setdefault(kind, OrderedDict())
        outgrown = self._outgrown.pop(kind, None)
        if outgrown is not None and not guards.counts:
            cases.pop(outgrown, None)
        cases[number] = guards
        self._next[kind] = number + 1
        if number >= CASES_ANNOUNCED:
            self._announce(
                "many",
                f"{number + 1} programs were made for calls of one kind because a value that forward reads in Python "
                f"changes from call to call: {guards.readings[-1].place}; {_AS_A_TENSOR}",
            )
        if len(cases) > MAX_CASES:
            cases.popitem(last=False)
            self._announce(
                "dropped",
                f"a value that forward reads in Python has come in more than {MAX_CASES} ways: "
                f"{guards.readings[-1].place}; the programs used last are kept, and where more values take turns every "
                f"call makes a program again; {_AS_A_TENSOR}",
            )

    def _announce(self, kind: str, message: str) -> None:
        """Warn, once for each kind of message."""
        if kind not in self._announced:
            self._announced.add(kind)
            warnings.warn(message, stacklevel=3)


def apart(value: Any, expected: Any) -> str:
    """Two readings that differ; of lists that are as long, the first entries that do."""
    places = ""
    while isinstance(value, tuple) and isinstance(expected, tuple) and len(value) == len(expected):
        place = next((place for place, pair in enumerate(zip(value, expected)) if repr(pair[0]) != repr(pair[1])), None)
        if place is None:
            break
        places += f"[{place}]"
        value, expected = value[place], expected[place]
    return f"{places and f'entry {places}: '}{value} instead of {expected}"


def _listed(places: frozenset[str]) -> str:
    return "; ".join(sorted(places))


def with_values_gathered(values: CallValues, capture: Callable[[], Graph]) -> Graph:
    """``capture()``, with the inputs gathered that it asks for; every rank must call this."""
    while True:
        try:
            return capture()
        except MissingValues as missing:
            if not values.gather([missing.path]):
                raise
