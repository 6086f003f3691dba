"""How many layers are frozen from which step of a training on, as a file says it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_models.checked_numbers import check_whole_number
from cost_models.fields import as_table, check_finite, check_keys, get_count, get_number, get_seconds, get_tables
from cost_models.files import read_toml
from cost_models.text import printable
from planner.changing.freeze_policy import FreezePolicy

#: Decisions of the adaptive rule that are looked at: a plan is searched for each that freezes more.
MOST_PHASES = 32


@dataclass(frozen=True)
class FreezePhase:
    """Steps from ``first_step`` on, ``num_steps`` of them, with that many layers frozen."""

    first_step: int
    num_steps: int
    frozen: int


@dataclass(frozen=True)
class FreezeSchedule:
    """The steps of a training, and what is frozen when.

    Attributes:
        steps: of the whole training.
        frozen: step → layers that are frozen from it on, from the first layer on; layers stay frozen.
        alpha, every: of the adaptive rule in its place, which decides every so many steps. Gradient norms are not known
            beforehand: the most that it may freeze is taken.
        replan_seconds: of making programs for another plan; None: ``runtime.migration.move_price.REPLAN_SECONDS``.
        steps_of_epoch: until each sample was seen once; None: not known, as only a cache needs it.

    Raises:
        ValueError: for steps outside of the training, layers that do not grow, and for both or neither of the two ways
            to say it.
    """

    steps: int
    frozen: Mapping[int, int]
    alpha: float | None = None
    every: int | None = None
    replan_seconds: float | None = None
    steps_of_epoch: int | None = None

    def __post_init__(self) -> None:
        if bool(self.frozen) is (self.alpha is not None):
            raise ValueError("a schedule has either [[freeze]] tables (step, layers) or one [adaptive] (alpha, every)")
        for step in (*self.frozen, *([] if self.every is None else [self.every])):
            if not 0 < step < self.steps:
                raise ValueError(
                    f"step {step} of the schedule: a training of {self.steps} steps freezes within 1 to "
                    f"{self.steps - 1}"
                )
        steps = sorted(self.frozen)
        for before, step in itertools.pairwise(steps):
            if self.frozen[step] <= self.frozen[before]:
                raise ValueError(
                    f"{self.frozen[step]} layers are to be frozen from step {step} on, and {self.frozen[before]} from "
                    f"step {before} on: frozen layers stay frozen, so give more each time"
                )
        if self.replan_seconds is not None and self.replan_seconds < 0:
            raise ValueError(f"replan_seconds = {self.replan_seconds}: seconds of at least 0")
        if self.steps_of_epoch is not None:
            check_whole_number("steps_of_epoch", self.steps_of_epoch, at_least=1)

    @staticmethod
    def from_toml(path: str | Path) -> FreezeSchedule:
        """Read a file.

        Raises:
            ValueError: for what no schedule can be.
        """
        table = read_toml(path, what="freeze schedule")
        try:
            return FreezeSchedule._of(table)
        except ValueError as error:
            raise ValueError(f"freeze schedule '{printable(str(path))}': {error}") from error

    @staticmethod
    def _of(table: dict[str, Any]) -> FreezeSchedule:
        check_finite(table, "the schedule")
        check_keys(table, ("steps", "replan_seconds", "steps_of_epoch", "freeze", "adaptive"), "the schedule")
        frozen: dict[int, int] = {}
        for entry in get_tables(table, "freeze", "the schedule") if "freeze" in table else []:
            check_keys(entry, ("step", "layers"), "[[freeze]]")
            step = get_count(entry, "step", "[[freeze]]")
            if step in frozen:
                raise ValueError(f"[[freeze]] says twice what is frozen from step {step} on")
            frozen[step] = get_count(entry, "layers", "[[freeze]]")
        rule: dict[str, Any] = {}
        if "adaptive" in table:
            adaptive = as_table(table["adaptive"], "[adaptive]")
            check_keys(adaptive, ("alpha", "every"), "[adaptive]")
            rule = {
                "alpha": get_number(adaptive, "alpha", "[adaptive]"),
                "every": get_count(adaptive, "every", "[adaptive]"),
            }
        if "replan_seconds" in table:
            rule["replan_seconds"] = get_seconds(table, "replan_seconds", "the schedule")
        if "steps_of_epoch" in table:
            rule["steps_of_epoch"] = get_count(table, "steps_of_epoch", "the schedule")
        return FreezeSchedule(get_count(table, "steps", "the schedule"), frozen, **rule)

    def phases(self, num_layers: int) -> tuple[FreezePhase, ...]:
        """The training of a model with so many layers; the first phase has nothing frozen.

        Raises:
            ValueError: for more layers than the model has, and for too many decisions.
        """
        changes = {0: 0}
        if self.alpha is None or self.every is None:
            policy = FreezePolicy.scheduled(num_layers, self.frozen)
            decisions = {step: step for step in sorted(self.frozen)}
        else:
            policy = FreezePolicy.adaptive(num_layers, self.alpha)
            decisions = {step: step // self.every for step in range(self.every, self.steps, self.every)}
        for step, decision in decisions.items():
            before = max(changes.values())
            if (count := policy.next(decision, before)) > before:
                changes[step] = count
        if len(changes) > MOST_PHASES:
            raise ValueError(
                f"the schedule freezes {len(changes) - 1} times, each of which is planned: {MOST_PHASES - 1} at most"
            )
        starts = list(changes)
        return tuple(
            FreezePhase(start, end - start, changes[start]) for start, end in zip(starts, [*starts[1:], self.steps])
        )
