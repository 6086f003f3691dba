"""Build dataclasses from plain data (JSON, TOML) with pydantic, and say in one line what is wrong with data that does
not fit.

The checks follow the dataclasses' own annotations, so that a new field is checked without a word here. Narrower types
(``Count``, ``Positive``) are in ``cost_models.fields``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from cost_models.fields import shown, unknown_field
from cost_models.text import printable

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

T = TypeVar("T")

#: Digits that some versions of pydantic read as infinity.
_NO_NUMBER = re.compile(r"\d{309}")

#: pydantic's name of a fault → what was expected.
_KINDS: Mapping[str, str] = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a table",
    "dataclass_type": "a table",
    "too_long": "a list of {max_length}",
    "literal_error": "{expected}",
}


def from_plain(kind: type[T], data: Any, *, where: str) -> T:
    """``data`` as the dataclass ``kind``; ``where`` names the place in error messages.

    Raises:
        ValueError: if a field is missing, unknown or of the wrong kind.
    """
    from pydantic import ValidationError

    try:
        text = json.dumps([data])
        if _NO_NUMBER.search(text):
            raise ValueError(f"{where} has a number of more than 308 digits: expected numbers of at most 64 bits")
        return _adapter(typing.cast(type, kind)).validate_json(text)[0]
    except ValidationError as error:
        raise ValueError(_in_words(kind, error.errors(include_url=False), where)) from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deep to be read") from None
    except TypeError as error:  # a date of TOML
        raise ValueError(f"{where} has a value that is no number, text, list or table: {error}") from None


@functools.cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    # Imported here: most commands read no such file, and it takes longer than everything else in this package.
    from pydantic import ConfigDict, TypeAdapter

    # A tuple, since a dataclass takes the configuration of what it stands in, and none of its own.
    in_tuple: Any = types.GenericAlias(tuple, kind)
    return TypeAdapter(in_tuple, config=ConfigDict(strict=True, extra="forbid"))


def _in_words(kind: type, errors: Sequence[ErrorDetails], where: str) -> str:
    """One line on the first fault; an unknown field comes before all else, since it is what another is missing."""
    error = min(errors, key=lambda each: each["type"] != "unexpected_keyword_argument")
    fault, path = error["type"], error["loc"][1:]
    place, parent = _place(where, path), _place(where, path[:-1])
    if fault == "unexpected_keyword_argument":
        return unknown_field(path[-1], _field_names(kind, path[:-1]), parent)
    if fault == "missing" and isinstance(path[-1], str):
        return f"{parent} needs {path[-1]!r}"
    if fault == "missing":
        return f"{parent} must be a list of more entries, got {shown(error['input'])}"
    if fault == "json_invalid":
        return f"{where} is nested too deep, or has a text that is not Unicode: {error['msg']}"
    if fault == "value_error":
        return f"{place}: {error['ctx']['error']}"
    expected = _KINDS[fault].format(**error.get("ctx", {})) if fault in _KINDS else error["msg"]
    return f"{place} must be {expected}, got {shown(error['input'])}"


def _place(where: str, path: Sequence[int | str]) -> str:
    return where + "".join(f"[{part}]" if isinstance(part, int) else f".{printable(part)}" for part in path)


def _field_names(kind: type, path: Sequence[int | str]) -> list[str]:
    """The fields of the dataclass at ``path`` of a ``kind``."""
    at_hand: type | None = kind
    for part in path:
        hints = typing.get_type_hints(at_hand) if at_hand is not None else {}
        at_hand = _dataclass_in(hints[part]) if part in hints else at_hand
    return [item.name for item in dataclasses.fields(at_hand)] if at_hand is not None else []


def _dataclass_in(hint: Any) -> type | None:
    """The first dataclass that an annotation names."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint
    return next(filter(None, map(_dataclass_in, typing.get_args(hint))), None)
