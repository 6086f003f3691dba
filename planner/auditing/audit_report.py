"""The report of an audit, figure by figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.short_text import ShortRepr
from cost_models.text import counted
from passes.plan.text_tables import format_bytes, format_seconds, format_table, table_in_width

SECONDS, BYTES, SHARE, NUMBER = "seconds", "bytes", "share", "number"
#: How far a recomputed figure may be from the claimed one, relative.
TOLERANCE = 1e-6


@dataclass(frozen=True, repr=False)
class AuditRow(ShortRepr):
    """One figure of a plan.

    Attributes:
        claimed, recomputed: what the plan says and what was found; a text where a number does not say it.
        unit: seconds, bytes, share or number: how numbers are printed.
        ok: whether they agree; None where the figure could not be checked.
        why: one line on what differs, how it was checked, or why it could not be.
    """

    figure: str
    claimed: float | str
    recomputed: float | str
    unit: str
    ok: bool | None
    why: str = ""

    @property
    def difference(self) -> float | None:
        """Of two numbers: recomputed against claimed, relative (of shares: absolute); None for anything else."""
        if isinstance(self.claimed, str) or isinstance(self.recomputed, str):
            return None
        if self.recomputed == self.claimed:
            return 0.0
        change = self.recomputed - self.claimed
        if self.unit == SHARE:
            return change
        return change / abs(self.claimed) if self.claimed else math.copysign(math.inf, change)


def compared(
    figure: str, claimed: float, recomputed: float, unit: str = SECONDS, *, least: float = 0.0, why: str = ""
) -> AuditRow:
    """The row of a figure that must agree within ``TOLERANCE`` of itself, or of ``least`` if that is more."""
    # A limit may be infinite.
    close = recomputed == claimed or abs(recomputed - claimed) <= TOLERANCE * max(abs(claimed), least)
    return AuditRow(figure, claimed, recomputed, unit, close, why)


def unchecked(figure: str, claimed: float | str, why: str, unit: str = NUMBER) -> AuditRow:
    """The row of a figure that could not be checked."""
    return AuditRow(figure, claimed, "", unit, None, why)


def refuted(figure: str, claimed: float | str, why: str, unit: str = NUMBER) -> AuditRow:
    """The row of a figure that cannot be true, so that there is nothing to recompute."""
    return AuditRow(figure, claimed, "", unit, False, why)


@dataclass(frozen=True, repr=False)
class AuditReport(ShortRepr):
    """The report of ``planner.audit``: one row a figure.

    Attributes:
        model, where: what the plan is of, and the mesh and cluster that it is for.
    """

    model: str
    where: str
    rows: tuple[AuditRow, ...]

    @property
    def ok(self) -> bool:
        """Whether no figure is wrong; figures that could not be checked do not count."""
        return not self.wrong

    @property
    def wrong(self) -> tuple[AuditRow, ...]:
        """Rows of figures that differ by more than their tolerance."""
        return tuple(row for row in self.rows if row.ok is False)

    @property
    def unchecked(self) -> tuple[AuditRow, ...]:
        """Rows of figures that could not be checked."""
        return tuple(row for row in self.rows if row.ok is None)

    def __str__(self) -> str:
        """The figures that are not ok, and the verdict."""
        return table_in_width(lambda: self._table((*self.wrong, *self.unchecked)))

    def table(self) -> str:
        """One line a figure, and the verdict."""
        return self._table(self.rows)

    def _table(self, rows: Sequence[AuditRow]) -> str:
        cells = [
            [row.figure, *(_text(value, row.unit) for value in (row.claimed, row.recomputed)), *_verdict(row)]
            for row in rows
        ]
        header = ("figure", "claimed", "recomputed", "difference", "verdict", "")
        title = f"{self.model} on {self.where}"
        counts = f"{counted(len(self.rows), 'figure')}, {len(self.wrong)} NOT ok, {len(self.unchecked)} not checked"
        return f"{format_table(title, header, cells) or title}\n{counts}"


def _text(value: float | str, unit: str) -> str:
    if isinstance(value, str):
        return value
    formats = {SECONDS: format_seconds, BYTES: format_bytes, SHARE: "{:.4%}".format, NUMBER: "{:,.6g}".format}
    return formats[unit](value) if value >= 0 or unit not in (SECONDS, BYTES) else f"-{formats[unit](-value)}"


def _verdict(row: AuditRow) -> tuple[str, str, str]:
    relative = "" if row.difference is None else f"{row.difference:+.1e}" if row.difference else "0"
    return relative, {True: "ok", False: "NOT ok", None: "not checked"}[row.ok], row.why
