"""What is printed, folded to the width of the terminal."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import TextIO

from passes.plan.text_tables import lines_within

#: Columns that are used at least, however narrow the terminal is.
LEAST_WIDTH = 40


@contextlib.contextmanager
def folded_output() -> Iterator[None]:
    """Fold what is printed inside of the ``with`` block to the terminal or ``$COLUMNS``; leave files as they are."""
    width = output_width()
    if width is None:
        yield
        return
    with lines_within(width), contextlib.redirect_stdout(_FoldedText(sys.stdout, width)):
        yield


def output_width() -> int | None:
    """Columns of the output; None if it is a file or a pipe and ``$COLUMNS`` does not say."""
    columns = os.environ.get("COLUMNS", "")
    if re.fullmatch(r"[1-9][0-9]{0,4}", columns):
        return max(LEAST_WIDTH, int(columns))
    if not sys.stdout.isatty():
        return None
    try:
        return max(LEAST_WIDTH, os.get_terminal_size(sys.stdout.fileno()).columns)
    except OSError:
        return None


def fold(line: str, width: int) -> str:
    """A line folded between words, the rest indented a little more than it begins."""
    if len(line) <= width:
        return line
    indent = re.match(r"\s*(?:[*] )?", line)
    rest = " " * min(len(indent[0]) + 2 if indent else 2, width // 2)
    return textwrap.fill(
        line, width, subsequent_indent=rest, break_on_hyphens=False, drop_whitespace=True, replace_whitespace=False
    )


class _FoldedText(io.TextIOBase):
    """Text of whole lines, each folded."""

    def __init__(self, target: TextIO, width: int) -> None:
        self.target, self.width = target, width

    def write(self, text: str) -> int:
        self.target.write("\n".join(fold(line, self.width) for line in text.split("\n")))
        return len(text)

    def flush(self) -> None:
        self.target.flush()

    def fileno(self) -> int:
        return self.target.fileno()

    def isatty(self) -> bool:
        return self.target.isatty()
