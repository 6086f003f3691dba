"""Seconds, bytes and tables as text that a person can read."""

from __future__ import annotations

from collections.abc import Sequence

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def format_seconds(seconds: float) -> str:
    """``12.3 ms``."""
    for unit, name in _SECONDS:
        if seconds >= unit:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds / 1e-6:.3g} µs" if seconds else "0 s"


def format_bytes(num_bytes: float) -> str:
    """``1.5 GiB``."""
    for unit, name in _BYTES:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes:.0f} B"


def format_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns under a title; empty if there are no rows."""
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (header, *rows)]
    return "\n".join([title, f"  {lines[0]}", f"  {'-' * len(lines[0])}", *(f"  {line}" for line in lines[1:])])


def format_list(title: str, lines: Sequence[str]) -> str:
    """Lines with bullets under a title; empty if there are none."""
    return "\n".join([title, *(f"  * {line}" for line in lines)]) if lines else ""
