"""Pins, ``{pattern: {axis: demand}}``, checked by their words alone: before a model is captured."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from passes.ir.types import parse_type


def check_pins(pins: Any, axes: Collection[str], *, what: str) -> None:
    """Raise ValueError for pins of another form, on another axis than ``axes``, or of a type that there is not.

    Args:
        what: whose axes they are, for the message.
    """
    if not isinstance(pins, Mapping):
        raise ValueError(f"constraints must be {{pattern: {{axis: demand}}}}, got {pins!r}")
    for pattern, by_axis in pins.items():
        if not isinstance(by_axis, Mapping):
            raise ValueError(f"constraint {pattern!r}: expected {{axis: demand}}, got {by_axis!r}")
        for axis, demand in by_axis.items():
            _check_words(pattern, demand)
            if axis not in axes:
                raise ValueError(f"constraint {pattern!r}: no axis {axis!r} in {what}")


def _check_words(pattern: Any, demand: Any) -> None:
    """Refuse what can be neither a type nor the label of a choice; labels are lower case."""
    words = [demand] if isinstance(demand, str) else demand
    for word in words if isinstance(words, Iterable) else [words]:
        if word == "S" or (isinstance(word, str) and any(letter.islower() for letter in word)):
            continue
        try:
            parse_type(word if isinstance(word, str) else repr(word))
        except ValueError as error:
            raise ValueError(f"constraint {pattern!r}: {error}, or the label of a choice such as 'cut n'") from None
