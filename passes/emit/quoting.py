"""Names of a model or a mesh as parts of Python source: nothing that they contain can end what they stand in."""

from __future__ import annotations

from cost_models.text import printable


def literal(text: str) -> str:
    """A string literal in double quotes whose value is ``text``."""
    return '"' + printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def comment(text: str) -> str:
    """What may stand behind a ``#``: one line."""
    return printable(text)


def docstring(text: str) -> str:
    """What may stand inside of triple double quotes."""
    return printable(text.replace("\\", "\\\\").replace('"', '\\"'))
