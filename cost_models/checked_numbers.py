"""Checks of numbers that a user gives."""

from __future__ import annotations

from typing import Any


def check_whole_number(name: str, value: Any, *, at_least: int) -> None:
    """Raise ValueError unless ``value`` is a whole number that is large enough."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name}={value!r}: give a whole number, at least {at_least}")
