"""Reading files that may be anything, and writing files so that nothing else is harmed.

What cannot be read is a ``ValueError`` in one line that names the file. A file that is written appears whole or not at
all, where the path leads: through symbolic links, and never in the place of a device, a pipe or a directory.
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cost_models.text import printable

#: Largest text file that is read: ours are far smaller, and a larger one might be meant to fill the memory.
MAX_TEXT_BYTES = 2**30


def read_json(path: str | Path, *, what: str = "file") -> Any:
    """The content of a JSON file; ``what`` names the expected content in errors.

    Raises:
        ValueError: if it cannot be read, or is not JSON of a sensible depth without duplicate names.
    """
    text = read_text(path, what=what)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{what} {printable(str(path))} is corrupted: {error}; make it again") from error


def parse_json(text: str | bytes) -> Any:
    """The value that a JSON text describes.

    Raises:
        ValueError: if it is no JSON, names something twice in one object, or is nested too deep to be read.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("its brackets are nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at line {error.lineno} ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not JSON: not UTF-8 at byte {error.start}") from error


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it names {twice[:60]!r} twice")
    return content


def read_toml(path: str | Path, *, what: str = "file") -> dict[str, Any]:
    """The content of a TOML file; ``what`` names the expected content in errors.

    Raises:
        ValueError: if it cannot be read, or is not TOML of a sensible depth.
    """
    text = read_text(path, what=what)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"{what} '{printable(str(path))}': its brackets are nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{what} '{printable(str(path))}': {printable(str(error))}") from error


def read_text(path: str | Path, *, what: str = "file") -> str:
    """The text of a regular file in UTF-8.

    Raises:
        ValueError: if it cannot be read, is no regular file, is empty, or is not UTF-8.
    """
    name = printable(str(path))
    if "\0" in str(path):
        raise ValueError(f"cannot read {what} '{name}': no file has such a name")
    try:
        # Do not wait for a pipe that nobody writes to.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"cannot read {what} '{name}': it is {_kind(status.st_mode)}")
            if status.st_size > MAX_TEXT_BYTES:
                raise ValueError(f"cannot read {what} '{name}': {status.st_size:,} bytes are no {what}")
            content = stream.read()
    except OSError as error:
        raise ValueError(f"cannot read {what} '{name}': {error.strerror or error}") from error
    if not content:
        raise ValueError(f"cannot read {what} '{name}': it is empty")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {what} '{name}': not text in UTF-8 (byte {error.start})") from error


def check_writable(path: str | Path) -> Path:
    """Where ``write_text`` would put a file named ``path``, its links followed.

    Raises:
        ValueError: if it is there and no regular file, its folder is not there, or one of them may not be written.
    """
    name = printable(str(path))
    try:
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode if target.exists() else None
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot write '{name}': {getattr(error, 'strerror', None) or error}") from error
    if mode is not None and not stat.S_ISREG(mode):
        raise ValueError(f"cannot write '{name}': it is {_kind(mode)}, give the path of a file")
    if str(path).endswith(os.sep):
        raise ValueError(f"cannot write '{name}': it is the path of a directory, give the path of a file")
    if not target.parent.is_dir():
        raise ValueError(f"cannot write '{name}': there is no directory '{printable(str(target.parent))}'")
    if not os.access(target.parent, os.W_OK | os.X_OK) or (mode is not None and not os.access(target, os.W_OK)):
        raise ValueError(f"cannot write '{name}': permission denied")
    return target


def write_text(path: str | Path, text: str) -> None:
    """Write a file that appears whole or not at all; an existing one keeps its permissions.

    Raises:
        ValueError: as ``check_writable``, and if the file system refuses it.
    """
    target = check_writable(path)
    partial = target.with_name(f".{target.name[:200]}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)
        with partial.open("x", encoding="utf-8") as stream:  # never through a link that somebody else put there
            stream.write(text)
        if target.exists():
            os.chmod(partial, stat.S_IMODE(target.stat().st_mode))
        os.replace(partial, target)
    except BaseException as error:  # an interrupt, too, leaves nothing beside the file
        with suppress(OSError):
            partial.unlink()
        if not isinstance(error, OSError):
            raise
        raise ValueError(f"cannot write '{printable(str(path))}': {error.strerror or error}") from error


def _kind(mode: int) -> str:
    kinds = {
        stat.S_ISDIR: "a directory",
        stat.S_ISCHR: "a device",
        stat.S_ISBLK: "a device",
        stat.S_ISFIFO: "a pipe",
        stat.S_ISSOCK: "a socket",
    }
    return next((kind for is_kind, kind in kinds.items() if is_kind(mode)), "no regular file")
