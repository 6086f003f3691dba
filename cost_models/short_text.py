"""What ``print`` and a debugger show of objects that hold much: a few lines of at most 80 columns."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Set
from typing import Any

from cost_models.text import printable, printable_lines

#: Columns of a line; characters of a field's value, and entries of a container, before they are cut or counted.
WIDTH, VALUE, ENTRIES = 80, 60, 4
_INDENT = "  "


def fold(text: str) -> str:
    """Each line of ``text`` in lines of at most ``WIDTH`` columns; what is folded is indented."""
    return "\n".join(_folded(line) for line in printable_lines(text).rstrip("\n").split("\n"))


def _folded(line: str) -> str:
    if len(line) <= WIDTH:
        return line
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(line, WIDTH, subsequent_indent=indent + _INDENT, break_on_hyphens=False)


class ShortRepr:
    """Base of dataclasses (with ``repr=False``) that show their fields, long values cut and long containers counted."""

    def __repr__(self) -> str:
        fields = (field for field in dataclasses.fields(self) if field.repr)  # type: ignore[arg-type]
        shown = ", ".join(f"{field.name}={_short(getattr(self, field.name))}" for field in fields)
        return fold(f"{type(self).__name__}({shown})")


def _short(value: Any) -> str:
    """``value`` in about ``VALUE`` characters."""
    if isinstance(value, str):
        return repr(value) if len(value) <= VALUE else repr(value[: VALUE - 1] + "…")
    if isinstance(value, (Mapping, tuple, list, Set)):
        text = _entries(value) if len(value) <= ENTRIES else ""
        return text if text and len(text) <= VALUE else f"<{len(value)} {'entry' if len(value) == 1 else 'entries'}>"
    text = " ".join(repr(value).split())
    return printable(text) if len(text) <= WIDTH else f"{type(value).__name__}(…)"


def _entries(value: Any) -> str:
    """A container of few entries."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_short(key)}: {_short(entry)}" for key, entry in value.items()) + "}"
    opening, closing = ("[", "]") if isinstance(value, list) else ("{", "}") if isinstance(value, Set) else ("(", ")")
    entries = ", ".join(map(_short, sorted(value, key=repr) if isinstance(value, Set) else value))
    return f"{opening}{entries}{',' if isinstance(value, tuple) and len(value) == 1 else ''}{closing}"
