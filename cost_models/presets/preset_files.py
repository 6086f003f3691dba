"""Where clusters and efficiency curves by name come from: this package, ``$MESHWRIGHT_PATH``, installed packages.

A folder of presets has a TOML file for each cluster and, in ``efficiency/``, one for each set of curves. There are this
package's own, those that the environment variable lists (separated as in ``PATH``), and those of installed packages
that have an entry point in the group ``meshwright.presets``, which names a package with such files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module, metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path

#: Environment variable with folders of presets, and the group of entry points of packages that have some.
PATH_VARIABLE, ENTRY_POINTS = "MESHWRIGHT_PATH", "meshwright.presets"
#: Folder of the efficiency curves, beside the clusters.
EFFICIENCY = "efficiency"


def cluster_files() -> dict[str, Traversable]:
    """Name → file of every cluster, this package's first.

    Raises:
        ValueError: if a folder cannot be read, or two files have one name.
    """
    return _files(os.environ.get(PATH_VARIABLE, ""), "", tuple(sys.path))


def efficiency_files() -> dict[str, Traversable]:
    """Name → file of every set of efficiency curves, this package's first.

    Raises:
        ValueError: if a folder cannot be read, or two files have one name.
    """
    return _files(os.environ.get(PATH_VARIABLE, ""), EFFICIENCY, tuple(sys.path))


@cache
def _files(path: str, subfolder: str, python_path: tuple[str, ...]) -> dict[str, Traversable]:
    """``python_path``: where packages with entry points are looked for."""
    files: dict[str, Traversable] = {}
    for folder in _folders(path):
        inner = folder / subfolder if subfolder else folder
        for file in sorted(inner.iterdir(), key=lambda file: file.name) if inner.is_dir() else ():
            name = file.name.removesuffix(".toml")
            if name == file.name or name.startswith("."):
                continue
            if name in files:
                raise ValueError(f"{file} and {files[name]} are both named {name!r}: rename one of them")
            files[name] = file
    return files


def _folders(path: str) -> Iterator[Traversable]:
    yield resources.files("cost_models.presets")
    for text in dict.fromkeys(path.split(os.pathsep)):
        if not text:
            continue
        folder = Path(text).expanduser()
        if not folder.is_dir():
            raise ValueError(f"${PATH_VARIABLE} names {text!r}, which is no folder: expected folders of .toml files")
        yield folder
    for entry in sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        try:
            package = import_module(entry.value)
            yield resources.files(package)
        except (ImportError, TypeError) as error:
            raise ValueError(
                f"entry point {entry.name!r} of {ENTRY_POINTS!r} names {entry.value!r}, which is no package of .toml "
                f"files: {error}"
            ) from error
