"""Progress of planning on a terminal; nothing is written anywhere else, so that pipes and logs stay clean."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cost_models.text import counted
from passes.plan.text_tables import format_seconds
from planner.whole_step.result.search_progress import SEARCHING, Report
from planner.whole_step.result.search_progress import Progress as Listener


@contextlib.contextmanager
def progress_bar(console: Console | None = None) -> Iterator[Listener | None]:
    """A listener for ``planner.plan(progress=…)`` that draws on standard error; None if that is not a terminal."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.fields[found]}"), console=console, transient=True, refresh_per_second=4
    ) as bar:
        task = bar.add_task("starting", total=None, found="")

        def listen(report: Report) -> None:
            if report.phase != SEARCHING:
                bar.update(task, description=_phase(report))
                return
            # The bar fills as the bound approaches the best plan.
            bar.update(task, description=_phase(report), total=1.0, completed=1.0 - report.gap, found=describe(report))

        yield listen


def _phase(report: Report) -> str:
    if report.phase == SEARCHING:
        return f"{report.phase} {counted(report.num_devices, 'device')}"
    return f"{report.phase}, {counted(report.operators, 'operator')}" if report.operators else report.phase


def describe(report: Report) -> str:
    """The state of a search in one line."""
    if not report.candidate:
        return f"nothing yet; {report.left:,} left"
    return (
        f"best {format_seconds(report.seconds)} ({report.candidate}), gap {report.gap:.1%}, {report.solved:,} solved, "
        f"{report.left:,} left"
    )
