"""The directory of checkpoints: complete ones under their names, a pointer to the last, unfinished ones beside them.

A checkpoint is written into ``.unfinished-<name>``; once all of it is on disk the folder takes its name, and only then
the pointer ``latest`` is replaced, then old ones are removed. A writer that is killed at any moment leaves the pointer
at a complete checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cost_models.files import parse_json, read_text
from cost_models.text import printable
from runtime.checkpoint.lock import lock

POINTER = "latest"
MANIFEST = "checkpoint.json"
METADATA = "metadata.json"
FORMAT = "meshwright-checkpoint"
VERSION = 2
#: What earlier versions wrote: DCP's files.
PICKLED_VERSION = 1
PICKLED_METADATA = ".metadata"
UNFINISHED = ".unfinished-"
_NAME = re.compile(r"step-(\d{1,18})(?:\.(\d{1,9}))?", re.ASCII)


def complete_names(directory: Path) -> list[str]:
    """Names of complete checkpoints, oldest first (a step that was saved again comes after its first save)."""
    if not directory.is_dir():
        return []
    matches = [match for entry in directory.iterdir() if (match := _NAME.fullmatch(entry.name))]
    return [match[0] for match in sorted(matches, key=lambda match: (int(match[1]), int(match[2] or 0)))]


def new_name(directory: Path, step: int) -> str:
    """A name for a checkpoint of ``step`` that no other has."""
    name, again = f"step-{step:08d}", 0
    while (directory / name).exists():
        again += 1
        name = f"step-{step:08d}.{again}"
    return name


def latest_name(directory: Path) -> str | None:
    """What the pointer says, or None if there is none.

    Raises:
        ValueError: if it is not the name of a checkpoint: it leads nowhere but into the directory.
    """
    pointer = directory / POINTER
    if not pointer.exists():
        return None
    name = read_text(pointer).strip()
    if not _NAME.fullmatch(name):
        raise ValueError(f"{pointer} says {name[:80]!r}, which is not the name of a checkpoint (write one there)")
    return name


def named(directory: Path, step: int | None) -> str:
    """The checkpoint of ``step``, or the latest.

    Raises:
        ValueError: if there is none.
    """
    name: str | None
    if step is None:
        name = latest_name(directory)
        if name is None:
            raise ValueError(f"there is no checkpoint in {directory}")
    else:
        of_step = [name for name in complete_names(directory) if step_of(name) == step]
        if not of_step:
            raise ValueError(f"there is no checkpoint of step {step} in {directory}, only {complete_names(directory)}")
        name = of_step[-1]
    return name


def step_of(name: str) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1])


def start(directory: Path, step: int) -> str:
    """Make room for a checkpoint; the name it will have. What killed writers left is removed.

    Raises:
        ValueError: if another job saves into the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock(directory)
    for leftover in directory.glob(UNFINISHED + "*"):
        shutil.rmtree(leftover, ignore_errors=True)
    name = new_name(directory, step)
    (directory / (UNFINISHED + name)).mkdir()
    return name


def commit(directory: Path, name: str, manifest: Mapping[str, Any], *, keep_last: int | None) -> None:
    """Turn the unfinished folder, all files of which are on disk, into the latest checkpoint."""
    folder = directory / (UNFINISHED + name)
    sizes = {entry.name: entry.stat().st_size for entry in folder.iterdir()}
    content = {"format": FORMAT, "version": VERSION, **manifest, "files": sizes, "metadata": _crc32(folder / METADATA)}
    write_synced(folder / MANIFEST, json.dumps({**content, "checksum": _checksum_of(content)}, indent=2))
    _sync(folder)
    os.rename(folder, directory / name)
    _sync(directory)
    unfinished = directory / f".{POINTER}"
    unfinished.unlink(missing_ok=True)
    write_synced(unfinished, name + "\n")
    os.replace(unfinished, directory / POINTER)
    _sync(directory)
    if keep_last is not None:
        _prune(directory, name, keep_last)


def _prune(directory: Path, latest: str, keep_last: int) -> None:
    """Remove all but the last ones, and never the latest, which may be of an earlier step than others."""
    names = [name for name in complete_names(directory) if name != latest]
    for name in names[: max(len(names) - keep_last + 1, 0)]:
        # A half-removed folder must not look like a checkpoint.
        gone = directory / (UNFINISHED + name)
        os.rename(directory / name, gone)
        shutil.rmtree(gone, ignore_errors=True)


def write_synced(file: Path, text: str) -> None:
    """Write a new file; all of it is on disk then."""
    with file.open("x", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    """Sync a folder: the names in it are on disk only once the folder itself is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_complete(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint that is all there.

    Raises:
        ValueError: saying what is missing, of another size, damaged, or of another kind.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no checkpoint {folder}")
    file = folder / MANIFEST
    if not file.exists():
        raise ValueError(f"{folder} is not a checkpoint of this kind: it has no {MANIFEST}")
    try:
        manifest = parse_json(read_text(file))
        sizes = {_plain_name(name): size for name, size in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({error})") from error
    if manifest.get("format") != FORMAT or manifest.get("version") not in (VERSION, PICKLED_VERSION):
        format_and_version = printable(f"{manifest.get('format')} {manifest.get('version')}"[:80])
        raise ValueError(
            f"{file} is damaged or of another kind: of format {format_and_version}, not {FORMAT} {VERSION}"
        )
    if is_pickled(manifest):
        _check_named(folder, sizes, PICKLED_METADATA)
    else:
        _check_named(folder, sizes, METADATA)
        if manifest.get("checksum") != _checksum_of(manifest):
            raise ValueError(f"{file} is damaged: it is not what was written; load an earlier checkpoint (step=)")
    for name, size in sizes.items():
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is damaged: {name} is missing")
        found_size = (folder / name).stat().st_size
        if found_size != size:
            raise ValueError(f"{folder} is damaged: {name} has {found_size} bytes, it was written with {size}")
    if not is_pickled(manifest) and _crc32(folder / METADATA) != manifest.get("metadata"):
        raise ValueError(
            f"{folder / METADATA} is damaged: it is not what was written; load an earlier checkpoint (step=)"
        )
    return manifest


def is_pickled(manifest: Mapping[str, Any]) -> bool:
    """Whether an earlier version wrote the checkpoint, with pickles in it."""
    return manifest.get("version") == PICKLED_VERSION


def _check_named(folder: Path, sizes: Mapping[str, Any], name: str) -> None:
    if name not in sizes:
        raise ValueError(f"{folder} is damaged: {MANIFEST} does not name {name}")


def _plain_name(name: str) -> str:
    if name in ("", ".", "..") or os.path.basename(name) != name:
        raise ValueError(f"it names {name[:80]!r}, which is not the name of a file in the checkpoint")
    return name


def _checksum_of(manifest: Mapping[str, Any]) -> str:
    """Of all that the manifest says but the checksum itself."""
    rest = {name: value for name, value in manifest.items() if name != "checksum"}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"


def _crc32(file: Path) -> str:
    return f"{zlib.crc32(file.read_bytes()):08x}"
