"""Gradients of several batches added up before one optimizer step: what each batch's gradient is multiplied by."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from numbers import Integral, Real


class Accumulation:
    """How many training steps share the next optimizer step, where a program says so with ``over``."""

    def __init__(self) -> None:
        self._num_steps: int | None = None
        self._steps_done = 0

    @contextlib.contextmanager
    def over(self, num_steps: int) -> Iterator[None]:
        """Weigh each training step inside by ``1 / num_steps``.

        Raises:
            ValueError: for a number that is not whole or below 1, inside of another ``over``, and at the end unless
                exactly ``num_steps`` steps were run: their gradients would add up to another weight than 1.
        """
        if isinstance(num_steps, bool) or not isinstance(num_steps, Integral) or num_steps < 1:
            raise ValueError(f"accumulate({num_steps!r}): give the number of train_step calls inside, a whole number")
        if self._num_steps is not None:
            raise ValueError(f"accumulate({num_steps}) inside of accumulate({self._num_steps}): use one of them")
        self._num_steps, self._steps_done = int(num_steps), 0
        try:
            yield
            if self._steps_done != num_steps:
                raise ValueError(
                    f"accumulate({num_steps}) saw {self._steps_done} train_step calls: their gradients are weighed by "
                    f"1/{num_steps} each and do not add up to a mean. Put all calls of one optimizer step inside, and "
                    "give their number (of a last group, the number of batches that are left)"
                )
        finally:
            self._num_steps = None

    def weight_of_step(self, weight: float | None) -> float:
        """The weight of the training step that is about to run; ``weight`` is what its caller gave.

        Raises:
            ValueError: for a weight that is no finite number, a weight inside of ``over``, and one step too many.
        """
        number = isinstance(weight, Real) and not isinstance(weight, bool)
        if weight is not None and not (number and math.isfinite(weight)):
            raise ValueError(f"weight={weight!r}: give a finite number, by which this batch's gradient is multiplied")
        if self._num_steps is None:
            return 1.0 if weight is None else float(weight)
        if weight is not None:
            raise ValueError(f"weight={weight!r} inside of accumulate({self._num_steps}): give one of the two")
        if self._steps_done == self._num_steps:
            raise ValueError(
                f"accumulate({self._num_steps}) has seen its {self._num_steps} train_step calls: end it, and step the "
                "optimizer, before the next"
            )
        self._steps_done += 1
        return 1.0 / self._num_steps
