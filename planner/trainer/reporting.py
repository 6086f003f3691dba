"""Progress of training, shown on the first rank only: a progress bar on a terminal, and lines in any case."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

#: Called on the first rank with what is logged, by name.
OnLog = Callable[[Mapping[str, float]], None]


class Reporter:
    """Losses of steps, read only now and then, since reading one waits for the device.

    Args:
        first: whether this is the rank that shows anything.
        log_every: steps between lines; 0 for none.
    """

    def __init__(self, *, first: bool, log_every: int, on_log: OnLog | None = None) -> None:
        self.first = first
        self.log_every = log_every
        self.on_log = on_log
        self.losses: list[float] = []
        self._pending: list[tuple[int, torch.Tensor]] = []
        console = Console(quiet=not first, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(
            *columns,
            TimeRemainingColumn(),
            TextColumn("{task.fields[loss]}"),
            console=console,
            disable=not (first and log_every and console.is_terminal),
            transient=True,
        )
        self._task = self._bar.add_task("training", total=None, loss="")
        self._since = (time.perf_counter(), 0)

    def __enter__(self) -> Reporter:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def start(self, step: int, total: int | None) -> None:
        """Start from ``step``; ``total`` steps are expected (None: unknown)."""
        self._bar.update(self._task, completed=step, total=total)
        self._since = (time.perf_counter(), step)

    def step(self, step: int, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Record the loss of one step."""
        self._pending.append((step, loss))
        self._bar.update(self._task, completed=step)
        if self.log_every and step % self.log_every == 0:
            count = len(self._pending)
            self.check()
            now, before = time.perf_counter(), self._since
            self._since = (now, step)
            self.log(
                step,
                loss=sum(self.losses[-count:]) / max(count, 1),
                lr=float(optimizer.param_groups[0]["lr"]),
                steps_per_second=(step - before[1]) / max(now - before[0], 1e-9),
            )

    def check(self) -> None:
        """Read the losses of the steps since the last time.

        Raises:
            FloatingPointError: if one of them is not a finite number.
        """
        pending, self._pending = self._pending, []
        for step, loss in pending:
            value = float(loss)
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"the loss of step {step} is {value}: lower the learning rate, clip gradients (max_grad_norm=1.0) "
                    "or look at the batch; no checkpoint has been written since"
                )
            self.losses.append(value)

    def log(self, step: int, **values: float) -> None:
        """Show values by name."""
        if not self.first:
            return
        if self.on_log is not None:
            self.on_log({"step": step, **values})
        if self.log_every:
            text = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
            self._bar.update(self._task, loss=text.split("  ")[0])
            self._bar.console.print(f"step {step:>6}  {text}", markup=False)

    def say(self, text: str) -> None:
        """A line of text."""
        if self.first and self.log_every:
            self._bar.console.print(text, markup=False, soft_wrap=True)
