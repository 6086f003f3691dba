"""Progress reports of planning."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

#: What planning does, in order.
READING, CAPTURING, ANALYSING, SEARCHING = "reading the model", "capturing", "analysing", "searching"
#: Seconds between two reports of a search without a new best plan.
INTERVAL = 0.2


@dataclass(frozen=True)
class Report:
    """The progress of planning.

    Attributes:
        phase: the current phase: one of this module's constants.
        candidate: the best plan so far, in words; empty before there is one.
        seconds: its seconds a step; infinite before there is one.
        bound: proved lower bound of the seconds a step of any plan.
        solved: candidates solved so far; ``left``: those that may still be better.
        num_devices: of the cluster that is being searched.
        operators: captured so far, while capturing a large model.
    """

    phase: str
    candidate: str = ""
    seconds: float = float("inf")
    bound: float = 0.0
    solved: int = 0
    left: int = 0
    num_devices: int = 0
    operators: int = 0

    @property
    def gap(self) -> float:
        """Relative distance of bound and seconds; 1 before there is a plan."""
        if self.seconds == float("inf"):
            return 1.0
        return max(0.0, 1.0 - self.bound / self.seconds) if self.seconds else 0.0


Progress = Callable[[Report], None]


class SearchTeller:
    """Reports a search now and then, and at every better plan."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self._last = (0.0, float("inf"))

    def tell(self, report: Callable[[], Report], *, seconds: float) -> None:
        """Report if the best plan's ``seconds`` are new, or the last report is ``INTERVAL`` seconds old."""
        now = time.monotonic()
        if self.progress is None or (seconds == self._last[1] and now - self._last[0] < INTERVAL):
            return
        self._last = (now, seconds)
        self.progress(report())
