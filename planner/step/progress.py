"""What planning tells of itself while it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: What planning does, in order.
READING, CAPTURING, ANALYSING, SEARCHING = "reading the model", "capturing", "analysing", "searching"
#: Seconds between two reports of a search that has found nothing better.
INTERVAL = 0.2


@dataclass(frozen=True)
class Report:
    """Where planning stands.

    Attributes:
        phase: what is being done: one of this module's constants.
        candidate: the best plan so far, in words; empty before there is one.
        seconds: a step of it; infinite before there is one.
        bound: no plan's step takes less, as far as it is known.
        solved: candidates solved so far; ``left``: those that may still be better.
        num_devices: of the cluster that is being searched.
    """

    phase: str
    candidate: str = ""
    seconds: float = float("inf")
    bound: float = 0.0
    solved: int = 0
    left: int = 0
    num_devices: int = 0

    @property
    def gap(self) -> float:
        """How much less the bound is than the seconds, as a share of them; 1 while nothing is known."""
        if self.seconds == float("inf"):
            return 1.0
        return max(0.0, 1.0 - self.bound / self.seconds) if self.seconds else 0.0


Progress = Callable[[Report], None]
