"""The folder of kept graphs: plain JSON files, bounded in number and bytes, safe to delete at any time.

A file is named by a hash of all that its graph depends on: the model's config, the shapes and options of its capture,
the versions of torch, transformers and this package, and the package's own source files. A file that cannot be read is
taken for absent and written anew; one that cannot be written is not kept.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cost_models.files import parse_json, write_text

#: Environment variable with the cache's folder; empty: nothing is kept.
FOLDER_VARIABLE = "MESHWRIGHT_CACHE"
#: Bounds of the folder: the graphs that were used longest ago are deleted beyond them.
MAX_FILES, MAX_BYTES = 128, 2**30
#: Folders of this package whose code makes graphs.
_SOURCES = ("passes", "planner/library", "runtime/kernels", "runtime/ops", "planner/fusing.py")
_FORMAT = 1


def kept_folder(kind: str) -> Path | None:
    """``kind`` in ``$MESHWRIGHT_CACHE``, or in ``meshwright`` of the user's cache folder; None if nothing is kept."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named is not None:
        return Path(named).expanduser() / kind if named else None
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "meshwright" / kind


def graphs_folder() -> Path | None:
    """The folder of graphs; None if nothing is kept."""
    return kept_folder("graphs")


def graph_key(**parts: Any) -> str:
    """The hash of what a graph depends on: ``parts``, which must be plain data, and the versions of what makes it."""
    return key_of(_SOURCES, parts)


def key_of(sources: tuple[str, ...], parts: Mapping[str, Any]) -> str:
    """The hash of plain data, of versions, and of this package's ``sources`` (folders and files)."""
    versions = {name: _version(name) for name in ("torch", "transformers", "meshwright")}
    text = json.dumps([_FORMAT, versions, _digest_of(sources), parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_graph(key: str) -> Mapping[str, Any] | None:
    """The content kept under ``key``, or None."""
    return read_kept("graphs", key)


def read_kept(kind: str, key: str) -> Mapping[str, Any] | None:
    """The content kept under ``key`` in the folder of that kind, or None."""
    folder = kept_folder(kind)
    if folder is None:
        return None
    path = folder / f"{key}.json"
    try:
        content = parse_json(path.read_bytes())
        os.utime(path)  # what was used last is deleted last
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def keep_graph(key: str, content: Mapping[str, Any]) -> None:
    """Keep ``content`` under ``key`` if the folder can be written, and delete what is too much."""
    keep("graphs", key, content)


def keep(kind: str, key: str, content: Mapping[str, Any]) -> None:
    """The same in the folder of that kind."""
    folder = kept_folder(kind)
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{key}.json", json.dumps(content, separators=(",", ":")))
        _delete_oldest(folder)
    except (OSError, ValueError):
        return


def _delete_oldest(folder: Path) -> None:
    """Delete what is too much; what processes that were killed had begun to write counts."""
    paths = (*folder.glob("*.json"), *folder.glob(".*.partial"))
    files = sorted(((path.stat(), path) for path in paths), key=lambda entry: -entry[0].st_mtime_ns)
    total = 0
    for place, (status, path) in enumerate(files):
        total += status.st_size
        if place and (place >= MAX_FILES or total > MAX_BYTES):
            path.unlink(missing_ok=True)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _digest_of(sources: tuple[str, ...]) -> str:
    """Of sizes and times of change of files."""
    root = Path(__file__).resolve().parents[2]
    files = [
        path for name in sources for path in ((root / name).rglob("*.py") if (root / name).is_dir() else [root / name])
    ]
    statuses = [(str(path.relative_to(root)), path.stat()) for path in sorted(files)]
    text = json.dumps([(name, status.st_size, status.st_mtime_ns) for name, status in statuses])
    return hashlib.sha256(text.encode()).hexdigest()
