"""Text from a file or a model, made safe to print on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` with an escape (``\\x1b``) in the place of every character that has no glyph of its own.

    Those are what a terminal obeys (control characters, ANSI sequences), and what changes how the rest reads (line
    separators, marks that turn the direction of writing).
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_lines(text: str) -> str:
    """``printable`` for text of several lines."""
    return text if text.replace("\n", "").isprintable() else "\n".join(map(printable, text.split("\n")))
