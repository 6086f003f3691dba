"""Rows of an audit: the intervals that a plan claims of its step and its memory, made again."""

from __future__ import annotations

from collections.abc import Iterator

from cost_models.memory_interval import memory_interval
from cost_models.step_interval import step_interval
from planner.auditing.audit_report import BYTES, SECONDS, AuditRow, compared, refuted
from planner.auditing.repriced_step import RepricedStep
from planner.auditing.subject import AuditSubject

Interval = tuple[float, float]


def interval_rows(subject: AuditSubject, priced: RepricedStep) -> Iterator[AuditRow]:
    """Both ends of each interval that is claimed; nothing of one that the plan leaves out."""
    step, cluster = subject.plan.step, subject.cluster
    seconds = step_interval(priced.simulated().seconds, cluster.groups, cluster.profile)
    num_bytes = memory_interval(priced.memory[step.fullest_rank], cluster.groups)
    yield from _rows("step, simulated", step.interval, seconds, SECONDS)
    yield from _rows("memory at its peak", step.memory_interval, num_bytes, BYTES)


def _rows(figure: str, claimed: Interval | None, again: Interval | None, unit: str) -> Iterator[AuditRow]:
    if claimed is None:
        return
    for place, end in enumerate(("from", "to")):
        name = f"{figure}, nine of ten {end}"
        if again is None:
            yield refuted(name, claimed[place], "of such devices nothing was measured", unit)
        else:
            yield compared(name, claimed[place], again[place], unit)
