"""Text for a terminal: a number with its noun; text from a file or a model, made safe to print."""

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


def counted(number: int, noun: str) -> str:
    """``1 device``, ``1,024 devices``, ``1 batch``, ``2 batches``."""
    ending = "" if number == 1 else "es" if noun.endswith(("ch", "sh", "s", "x")) else "s"
    return f"{number:,} {noun}{ending}"
