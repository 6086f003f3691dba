"""The clusters that come with the package: one TOML file each, every figure with its source beside it.

Conventions of the figures: flops are dense (vendors often print the figure with sparsity, twice as much);
``float32`` is torch's default precision ("highest", no TF32), ``tfloat32`` is what float32 matmuls reach once TF32 is
allowed; memory is what the driver reports; link bandwidth is of one link (``shared_by`` says of how many devices) and
in one direction (NVLink's "900 GB/s" is 450 each way).

``efficiency/`` holds the curves, one file for each kind of chip, since several clusters have the same. Others add to
both (``preset_files``).
"""

from __future__ import annotations

import tomllib
from importlib.resources.abc import Traversable
from typing import Any

from cost_models.presets.preset_files import cluster_files, efficiency_files


def preset_names() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    return tuple(sorted(cluster_files()))


def efficiency_names() -> tuple[str, ...]:
    """Names of all sets of efficiency curves, sorted."""
    return tuple(sorted(efficiency_files()))


def load_efficiency(name: str) -> dict[str, Any]:
    """A set of curves as a device's ``efficiency`` table; ``name`` must be one of ``efficiency_names()``.

    Raises:
        ValueError: if its file cannot be read.
    """
    return _content(efficiency_files()[name], "efficiency curves")


def load_preset(name: str) -> dict[str, Any]:
    """The preset's data in the format of ``cost_models.cluster_format``; ``name`` must be one of ``preset_names()``.

    Raises:
        ValueError: if its file cannot be read.
    """
    return _content(cluster_files()[name], "cluster file")


def _content(file: Traversable, what: str) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} '{file}': {error or type(error).__name__}") from error
