"""Installed packages that extend the planner: entry points in the group ``meshwright.extensions``."""

from __future__ import annotations

import functools
from importlib import metadata

#: Each names a module; importing it registers what it brings.
ENTRY_POINTS = "meshwright.extensions"


@functools.cache
def load_extensions() -> None:
    """Import the modules that installed packages name, in the order of their names, once in a process.

    Raises:
        ValueError: naming the entry point, if its module cannot be imported.
    """
    for entry in sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda entry: (entry.name, entry.value)):
        try:
            entry.load()
        except Exception as error:  # whatever a module of somebody else raises
            raise ValueError(
                f"entry point {entry.name!r} of {ENTRY_POINTS!r} names {entry.value!r}, which cannot be imported: "
                f"{type(error).__name__}: {error}; mend or uninstall its package"
            ) from error
