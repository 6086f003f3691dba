"""A study as data: which models are planned on which clusters, at which sizes, under which options and layouts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cost_models.cluster import Cluster
from cost_models.short_text import ShortRepr

#: The layout of rows whose choices are all searched.
SEARCHED = "searched"
#: The options of a study that names none.
DEFAULT_OPTIONS = "default"
#: Integer programs that a row's search may solve, unless the study says so: most searches solve 20 to 250.
MAX_PROGRAMS = 1000


@dataclass(frozen=True, repr=False)
class StudyGrid(ShortRepr):
    """Every combination of these; ``options`` and ``layouts`` are names.

    Attributes:
        devices: how many of each cluster's devices; empty: all of them.
        global_batches: samples of a step; else ``samples_per_device`` of them for each device.
        seq_lens: tokens of a sample; ``None`` for models without.
        baselines: experts' layouts to compare every searched row with.
    """

    models: tuple[str, ...]
    clusters: tuple[str, ...]
    devices: tuple[int, ...]
    global_batches: tuple[int, ...]
    samples_per_device: tuple[int, ...]
    seq_lens: tuple[int | None, ...]
    options: tuple[str, ...]
    layouts: tuple[str, ...]
    baselines: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Study(ShortRepr):
    """What a sweep plans, and how its results are shown.

    Attributes:
        options: name → arguments of ``planner.plan``.
        layouts: name → choices that are fixed, as ``planner.plan(fix=…)`` takes them.
        prices: cluster, preset or ``""`` (all others) → price of a device for an hour, in any currency; of unlike
            presets side by side each device has its own preset's.
        target_tokens_per_second: throughputs of which the fewest devices are looked for.
        folder: where relative paths of models and clusters begin.
    """

    title: str
    grids: tuple[StudyGrid, ...]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {DEFAULT_OPTIONS: {}})
    layouts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prices: Mapping[str, float] = field(default_factory=dict)
    target_tokens_per_second: tuple[float, ...] = ()
    max_programs: int = MAX_PROGRAMS
    folder: str = "."

    def price(self, cluster: str, num_devices: int) -> float | None:
        """The price of a device for an hour, in the mean over the first ``num_devices`` of ``cluster``.

        None if the study has none for some of them.
        """
        for name in (cluster, family_of(cluster)):
            if name in self.prices:
                return self.prices[name]
        parts = parts_of(cluster)
        if len(parts) == 1:
            return self.prices.get("")
        total, remaining = 0.0, num_devices
        for part in parts:
            count = min(remaining, _num_devices(part))
            price = self.price(part, count)
            if price is None and count:
                return None
            total, remaining = total + count * (price or 0.0), remaining - count
        return total / num_devices


def parts_of(cluster: str) -> tuple[str, ...]:
    """The presets, each with its sizes, that a cluster's name has with ``+`` between them; a file is one part."""
    return (cluster,) if cluster.endswith(".toml") else tuple(part.strip() for part in cluster.split("+"))


def family_of(cluster: str) -> str:
    """What clusters that differ in their sizes alone have in common: their presets' names, or the file."""
    return cluster if cluster.endswith(".toml") else "+".join(part.partition(":")[0] for part in parts_of(cluster))


@functools.lru_cache(maxsize=256)
def _num_devices(preset: str) -> int:
    return Cluster.parse(preset).num_devices
