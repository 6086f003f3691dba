"""Lines of at most 120 columns: comments beside the code or above it, long statements broken inside brackets."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from passes.emit.quoting import comment as comment_text

WIDTH = 120
#: What stands in a method is indented by so much.
METHOD_INDENT = 8
#: Where comments start inside a method, if the code before them is not longer.
COMMENT_COLUMN = 64
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def fits(line: str) -> bool:
    """Whether a line of a method, not indented yet, leaves no column over."""
    return len(line) <= WIDTH - METHOD_INDENT


def with_comment(line: str, comment: str) -> list[str]:
    """A line of a method with a comment to its right, or above it where there is no room."""
    if not comment:
        return [line]
    comment = comment_text(comment)
    together = f"{line.ljust(COMMENT_COLUMN)}  # {comment}"
    if fits(together):
        return [together]
    indent = line[: len(line) - len(line.lstrip())]
    return [f"{indent}# {comment}", line]


def fitted(source: str) -> str:
    """``source`` with every line that is too long broken, if it can be."""
    return "".join(f"{line}\n" for whole in source.splitlines() for line in _broken(whole))


def _broken(line: str) -> list[str]:
    if len(line) <= WIDTH:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    if line.lstrip().startswith("#"):
        text = line.strip().removeprefix("#").strip()
        return textwrap.wrap(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ",
                             break_long_words=False, break_on_hyphens=False)  # fmt: skip
    brackets = [span for span in _brackets(line) if span[1] - span[0] > 1]
    if not brackets:
        code = line.strip().removeprefix("return ")
        returns = line.strip().startswith("return ") and ", " in code
        return [f"{indent}return (", *_filled(code, f"{indent}    "), f"{indent})"] if returns else [line]
    start, end = max(brackets, key=lambda span: span[1] - span[0])
    inside = _filled(line[start + 1 : end], f"{indent}    ")
    return [line[: start + 1], *inside, *_broken(indent + line[end:])]


def _filled(text: str, indent: str) -> list[str]:
    """What stands in brackets, as many parts in a line as there is room for."""
    lines: list[str] = []
    for part in _parts(text):
        joined = f"{lines[-1]} {part}" if lines else ""
        if lines and len(joined) <= WIDTH:
            lines[-1] = joined
        else:
            lines.append(indent + part)
    return [short for line in lines for short in _broken(line)]


def _parts(text: str) -> Iterator[str]:
    """``text`` cut behind the commas that stand in no further bracket."""
    start = 0
    for position, char, depth in _scanned(text):
        if char == "," and depth == 0:
            yield text[start : position + 1].strip()
            start = position + 1
    if text[start:].strip():
        yield text[start:].strip()


def _brackets(line: str) -> Iterator[tuple[int, int]]:
    """Where the outermost brackets of a line open and close; not the one that a broken line starts by closing."""
    opened: int | None = None
    for position, char, depth in _scanned(line):
        if char in _CLOSING and depth == 1:
            opened = position
        elif char in _CLOSING.values() and depth == 0 and opened is not None:
            yield opened, position
            opened = None


def _scanned(text: str) -> Iterator[tuple[int, str, int]]:
    """Position, character and depth of brackets (an opening one counts) of the code in ``text``; strings left out."""
    depth, quote, position = 0, "", 0
    while position < len(text):
        char = text[position]
        if quote:
            if char == "\\":
                position += 1
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char == "#":
            return
        else:
            # What is left of a broken line starts by closing a bracket.
            depth = max(0, depth + (char in _CLOSING) - (char in _CLOSING.values()))
            yield position, char, depth
        position += 1
