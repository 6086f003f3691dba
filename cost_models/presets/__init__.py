"""The clusters that come with the package: one TOML file each, every figure with its source beside it.

Conventions of the figures: flops are dense (vendors often print the figure with sparsity, twice as much);
``float32`` is torch's default precision ("highest", no TF32), ``tfloat32`` is what float32 matmuls reach once TF32 is
allowed; memory is what the driver reports; link bandwidth is of one link (``shared_by`` says of how many devices) and
in one direction (NVLink's "900 GB/s" is 450 each way).

``efficiency/`` holds the curves, one file for each kind of chip, since several clusters have the same.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any


@cache
def preset_names() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


@cache
def efficiency_names() -> tuple[str, ...]:
    """Names of all sets of efficiency curves, sorted."""
    files = (resources.files(__name__) / "efficiency").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def load_efficiency(name: str) -> dict[str, Any]:
    """A set of curves as a device's ``efficiency`` table; ``name`` must be one of ``efficiency_names()``."""
    return tomllib.loads((resources.files(__name__) / "efficiency" / f"{name}.toml").read_text(encoding="utf-8"))


def load_preset(name: str) -> dict[str, Any]:
    """The preset's data in the format of ``cost_models.cluster_format``; ``name`` must be one of ``preset_names()``."""
    return tomllib.loads((resources.files(__name__) / f"{name}.toml").read_text(encoding="utf-8"))
