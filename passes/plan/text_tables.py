"""Seconds, bytes and tables as text that a person can read."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from cost_models.short_text import WIDTH, fold

#: Characters that a column keeps when a table is made to fit.
LEAST_COLUMN = 12
_line_width: ContextVar[int | None] = ContextVar("line_width", default=None)
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def format_seconds(seconds: float) -> str:
    """``12.3 ms``."""
    for unit, name in _SECONDS:
        if abs(seconds) >= unit:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds / 1e-6:.3g} µs" if seconds else "0 s"


def format_seconds_between(seconds: float, interval: tuple[float, float] | None) -> str:
    """``1.03 s (0.96–1.12)``: the interval in the unit of ``seconds``; without one as ``format_seconds``."""
    if interval is None:
        return format_seconds(seconds)
    unit = next((unit for unit, _ in _SECONDS if seconds >= unit), _SECONDS[-1][0])
    low, high = (f"{bound / unit:.{2 if bound < 10 * unit else 1 if bound < 100 * unit else 0}f}" for bound in interval)
    return f"{format_seconds(seconds)} ({low}–{high})"


def format_rate(rate: float) -> str:
    """A number with four digits at least, its thousands grouped."""
    return f"{rate:,.0f}" if rate >= 1000.0 else f"{rate:,.4g}"


def format_bytes(num_bytes: float) -> str:
    """``1.5 GiB``."""
    for unit, name in _BYTES:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes:.0f} B"


def format_bytes_between(num_bytes: float, interval: tuple[float, float] | None) -> str:
    """``73.7 GiB (71.3–77.2)``: the interval in the unit of ``num_bytes``; without one as ``format_bytes``."""
    if interval is None:
        return format_bytes(num_bytes)
    unit = next((unit for unit, _ in _BYTES if num_bytes >= unit), 1)
    low, high = (f"{bound / unit:.3g}" for bound in interval)
    return f"{format_bytes(num_bytes)} ({low}–{high})"


def format_change(other: float, ours: float) -> str:
    """By how much ``other`` is more than ``ours``, ``+1.50%``; ``+0.00%`` of nothing."""
    return f"{other / ours - 1.0:+.2%}" if ours else "+0.00%"


@contextmanager
def lines_within(width: int | None) -> Iterator[None]:
    """Let tables made inside of the ``with`` block have lines of at most ``width`` columns (None: of any length)."""
    token = _line_width.set(width)
    try:
        yield
    finally:
        _line_width.reset(token)


def table_in_width(table: Callable[[], str]) -> str:
    """What ``table`` gives, no line longer than ``print`` shows of any object."""
    with lines_within(WIDTH):
        return fold(table())


def format_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns under a title; empty if there are no rows. Cells fold where ``lines_within`` says so."""
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    _narrow(widths, _line_width.get())
    lines = [line for row in (header, *rows) for line in _folded(row, widths)]
    num_header = len(_folded(header, widths))
    rule = "-" * max(map(len, lines[:num_header]))
    return "\n".join([title, *(f"  {line}" for line in (*lines[:num_header], rule, *lines[num_header:]))])


def _narrow(widths: list[int], width: int | None) -> None:
    """Take from the widest columns what is more than ``width``."""
    while width is not None and sum(widths) + 2 * len(widths) > width and max(widths) > LEAST_COLUMN:
        widest = widths.index(max(widths))
        excess = sum(widths) + 2 * len(widths) - width
        second = max((other for index, other in enumerate(widths) if index != widest), default=0)
        widths[widest] = max(LEAST_COLUMN, widths[widest] - excess, min(second, widths[widest] - 1))


class _Wrapper(textwrap.TextWrapper):
    """Breaks lines at spaces, and dotted names between their parts: ``model.layers.`` | ``aten.mul``."""

    wordsep_simple_re = re.compile(r"(\s+|(?<=[.:])(?=[A-Za-z*_]))")


def _folded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """The lines of one row."""
    cells = [
        [cell] if len(cell) <= width else _Wrapper(width, break_on_hyphens=False).wrap(cell)
        for cell, width in zip(row, widths)
    ]
    lines = itertools.zip_longest(*cells, fillvalue="")
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]


def format_list(title: str, lines: Sequence[str]) -> str:
    """Lines with bullets under a title; empty if there are none."""
    return "\n".join([title, *(f"  * {line}" for line in lines)]) if lines else ""
