"""Build dataclasses from plain data (JSON), and say clearly what is wrong with data that does not fit.

The checks follow the dataclasses' own annotations, so that a new field is checked without a word here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
import typing
from typing import Any, TypeVar

from cost_models.text import printable

T = TypeVar("T")


def from_plain(kind: type[T], data: Any, *, where: str) -> T:
    """``data`` as the dataclass ``kind``; ``where`` names the place in error messages.

    Raises:
        ValueError: if a field is missing, unknown or of the wrong kind.
    """
    return _build(kind, data, where)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _build(hint: Any, data: Any, where: str) -> Any:
    """``data`` as the type ``hint``; ``where`` names the place in error messages."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _build_dataclass(hint, data, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return data
    if origin is dict:
        _expect(isinstance(data, dict), "an object", data, where)
        return {key: _build(arguments[1], item, f"{where}.{printable(key)}") for key, item in data.items()}
    if origin is tuple:
        _expect(isinstance(data, (list, tuple)), "a list", data, where)
        if arguments[-1] is not ...:
            _expect(len(data) == len(arguments), f"a list of {len(arguments)}", data, where)
        hints = arguments if arguments[-1] is not ... else itertools.repeat(arguments[0])
        return tuple(_build(hint, item, f"{where}[{index}]") for index, (hint, item) in enumerate(zip(hints, data)))
    if origin in (typing.Union, types.UnionType):
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if data is None else _build(inner, data, where)
    if hint is float:
        _expect(isinstance(data, (int, float)) and not isinstance(data, bool), "a number", data, where)
        try:
            return float(data)
        except OverflowError:
            raise ValueError(f"{where}: expected a number of at most 64 bits") from None
    _expect(isinstance(data, hint) and (hint is bool or not isinstance(data, bool)), hint.__name__, data, where)
    return data


def _build_dataclass(kind: type, data: Any, where: str) -> Any:
    _expect(isinstance(data, dict), "an object", data, where)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    unknown = sorted(set(data) - set(fields))
    missing = sorted(
        name
        for name, item in fields.items()
        if name not in data and item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    )
    if unknown or missing:
        raise ValueError(f"{where}: unknown fields {unknown}, missing fields {missing}")
    hints = _hints(kind)
    return kind(**{name: _build(hints[name], item, f"{where}.{name}") for name, item in data.items()})


def _expect(holds: bool, expected: str, data: Any, where: str) -> None:
    if not holds:
        raise ValueError(f"{where}: expected {expected}, got {type(data).__name__} {str(data)[:40]!r}")
