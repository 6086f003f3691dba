"""Reads fields of plain data strictly: every error names the field, what was expected and what was found."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Interval, Len, Predicate

from cost_models.text import printable

Table = Mapping[str, Any]
#: Names are shown in tables.
MAX_TEXT = 1000
#: Larger counts are mistakes, and cost time and memory to compute with.
MAX_COUNT = 2**40
MAX_FLOAT = sys.float_info.max


@dataclass(frozen=True)
class Expected:
    """Behind the constraints of an ``Annotated`` type: what a value must be, in the words of error messages."""

    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import custom_error_schema

        return custom_error_schema(handler(source), "expected", custom_error_message=self.words)


#: Types of fields of dataclasses that ``cost_models.records`` builds.
Count = Annotated[int, Interval(ge=1, le=MAX_COUNT), Expected(f"an integer of at least 1 and at most {MAX_COUNT:,}")]
Positive = Annotated[float, Interval(gt=0), Expected("a number above 0")]
Seconds = Annotated[float, Interval(ge=0, lt=math.inf), Expected("a finite number of seconds, 0 or more")]
Text = Annotated[str, Len(1, MAX_TEXT), Predicate(str.isprintable), Expected("one line of printable characters")]


def suggest(word: str, candidates: Iterable[str]) -> str:
    """``", did you mean 'x'?"`` if a candidate is spelt like ``word``, else an empty text."""
    close = difflib.get_close_matches(word, list(candidates), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def shown(value: Any) -> str:
    """A value as error messages show it: on one line, shortened."""
    text = "a number of many digits" if isinstance(value, int) and abs(value) >= 10**40 else printable(repr(value))
    return text if len(text) <= 100 else f"{text[:100]}…"


def check_finite(value: Any, where: str) -> None:
    """Check that no number in plain data is infinite, nan, or too large to compute with.

    Raises:
        ValueError: naming the place of the number.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_finite(item, f"{where}.{printable(str(key))}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_finite(item, f"{where}[{index}]")
    elif isinstance(value, (int, float)) and not -MAX_FLOAT <= value <= MAX_FLOAT:
        raise ValueError(f"{where} must be a finite number, got {shown(value)}")


def get_field(table: Table, key: str, where: str) -> Any:
    if key not in table:
        raise ValueError(f"{where} needs {key!r}")
    return table[key]


def check_keys(table: Table, allowed: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in allowed:
            raise ValueError(unknown_field(key, allowed, where))


def unknown_field(key: Any, allowed: Sequence[str], where: str) -> str:
    """The words for a field that ``where`` cannot have, with the one that was meant."""
    hint = suggest(str(key), allowed) or f": expected one of {', '.join(allowed)}"
    return f"{where} has an unknown field {shown(key)}{hint}"


def as_table(value: Any, where: str) -> Table:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a table, got {shown(value)}")
    return value


def get_tables(table: Table, key: str, where: str) -> list[Table]:
    value = get_field(table, key, where)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: {key!r} must be a list of at least one table ([[{key}]]), got {shown(value)}")
    return [as_table(item, f"{key}[{index}]") for index, item in enumerate(value)]


def get_text(table: Table, key: str, where: str) -> str:
    value = get_field(table, key, where)
    if not isinstance(value, str) or not value or len(value) > MAX_TEXT:
        raise ValueError(f"{where}.{key} must be a text, got {shown(value)}")
    if not value.isprintable():
        raise ValueError(f"{where}.{key} must be one line of printable characters, got {shown(value)}")
    return value


def get_count(table: Table, key: str, where: str) -> int:
    value = get_field(table, key, where)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}.{key} must be an integer of at least 1, got {shown(value)}")
    if value > MAX_COUNT:
        raise ValueError(f"{where}.{key} must be an integer of at most {MAX_COUNT:,}, got {shown(value)}")
    return value


def get_number(table: Table, key: str, where: str) -> float:
    value = get_field(table, key, where)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{where}.{key} must be a number above 0, got {shown(value)}")
    return float(value)


def get_seconds(table: Table, key: str, where: str) -> float:
    value = get_field(table, key, where)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{where}.{key} must be a finite number of seconds, 0 or more, got {shown(value)}")
    return float(value)


def get_flag(table: Table, key: str, where: str) -> bool:
    """True or false, false where the field is not there."""
    value = table.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{where}.{key} must be true or false, got {shown(value)}")
    return value


def get_share(table: Table, key: str, where: str, *, below: float) -> float:
    """A number from 0 to ``below`` (excluded), 0 where the field is not there."""
    value = table.get(key, 0.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < below:
        raise ValueError(f"{where}.{key} must be a number from 0 to less than {below:g}, got {shown(value)}")
    return float(value)
