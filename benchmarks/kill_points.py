"""Points within a training step at which a process kills itself: told by what Python calls, and by no clock.

A point opens with a call (of the step, of autograd, of the copy to the second holder) and kills at one that comes
behind it, such as the second ``linear`` of the step, or the first collective that was started and not waited for.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

_STARTED = ("allreduce", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "send", "recv", "reduce")


@dataclass(frozen=True)
class Phase:
    """Part of a step.

    Attributes:
        opens: the function, of Python or of torch's C++, with which it begins.
        kills: the event of ``sys.setprofile`` and the functions; none: any.
        most: a point is one of the first so many events.
    """

    name: str
    opens: str
    event: str
    kills: tuple[str, ...]
    most: int


PHASES = (
    Phase("forward", "train_step", "c_call", ("linear",), 2),
    Phase("collective", "train_step", "c_return", _STARTED, 3),
    Phase("backward", "run_backward", "", (), 40),
    Phase("optimizer", "train_step", "c_call", ("addcdiv_", "_foreach_addcdiv_"), 2),
    Phase("copy to the second holder", "_exchange", "", (), 40),
    Phase("copies settled", "settle", "", (), 40),
)


@dataclass(frozen=True)
class KillPoint:
    """Process ``rank`` dies at the ``count``-th event of a phase, after ``steps`` steps with all processes."""

    phase: Phase
    count: int
    rank: int
    steps: int


def drawn(num_points: int, num_ranks: int, seed: int) -> tuple[KillPoint, ...]:
    """So many points; each phase comes as often as the others."""
    draw = random.Random(seed)
    phases = [PHASES[number % len(PHASES)] for number in range(num_points)]
    draw.shuffle(phases)
    return tuple(
        KillPoint(phase, draw.randint(1, phase.most), draw.randrange(num_ranks), draw.randint(1, 3)) for phase in phases
    )


class Fate:
    """Says of a process that takes part whether it is to die in a step, and how many have died before it."""

    def __init__(self, points: Sequence[KillPoint], num_ranks: int, folder: Path) -> None:
        self._points, self._num_ranks, self._folder = points, num_ranks, folder
        self._round = -1
        self._steps = 0
        self.num_killed = 0

    def begin_step(self, number: int, *, round_number: int, rank: int, num_ranks: int) -> None:
        """Arm the next point if it is one of this rank and of this step.

        Args:
            round_number: another one whenever other processes take part.
        """
        if round_number != self._round:
            # Nobody dies in the first step of a round, so that all read the same number here.
            self._round, self._steps = round_number, 0
            self.num_killed = len(list(self._folder.glob("killed-*")))
        point = self._points[self.num_killed] if self.num_killed < len(self._points) else None
        if point is not None and num_ranks == self._num_ranks and self._steps >= point.steps and rank == point.rank:
            arm(point, self._folder / f"killed-{self.num_killed}", f"{point.phase.name} of step {number}, rank {rank}")
        self._steps += 1


def arm(point: KillPoint, file: Path, words: str) -> None:
    """Let this process die at a point, and say so in ``file`` before."""
    phase, left, is_open = point.phase, point.count, False

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left, is_open
        name = frame.f_code.co_name if event in ("call", "return") else getattr(argument, "__name__", "")
        if not is_open:
            is_open = name == phase.opens and event in ("call", "c_call")
        elif not phase.kills or (event == phase.event and name in phase.kills):
            left -= 1
            # Nothing of Python may have run within what opened the phase.
            if left <= 0 or (event.endswith("return") and name == phase.opens == "run_backward"):
                file.write_text(words, encoding="utf-8")
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(look)
