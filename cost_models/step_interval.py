"""The interval of a predicted step: how far published runs on such devices were from their predictions.

Of a cluster that ``planner profile`` measured three things are added up in squares, of which none depends on another:
how far calls that were kept back are from their prices (kinds of work and collectives one by one, each with as much of
the step as it has of the calls), how far the same call was from itself while all was measured, and how far whole steps
were from the sum of their calls, for which the published runs of all chips stand.

``presets/residuals/published_runs.toml`` has, for each chip, the quantiles of measured over predicted seconds of the
calibration half of ``benchmarks/published_runs``; ``python -m benchmarks.published --write`` fits and writes it, and
says how many runs of the other half lie inside.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from cost_models.hardware import DeviceGroup
from cost_models.measured_profile import SAME_CALL, Profile

#: Share of measured steps that is meant to lie in an interval.
NOMINAL_SHARE = 0.9


@dataclass(frozen=True)
class ResidualQuantiles:
    """Of one kind of chip: measured over predicted seconds.

    Attributes:
        devices: parts of the names of devices that have the chip.
        low, high: the quantiles that ``NOMINAL_SHARE`` of the runs lie between.
        runs: how many they were taken from.
    """

    devices: tuple[str, ...]
    low: float
    high: float
    runs: int


@cache
def published_residuals() -> Mapping[str, ResidualQuantiles]:
    """Chip → quantiles of its published runs."""
    file = resources.files("cost_models.presets") / "residuals" / "published_runs.toml"
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    return {chip: ResidualQuantiles(**{**row, "devices": tuple(row["devices"])}) for chip, row in table.items()}


def step_interval(
    seconds: float, groups: Iterable[DeviceGroup], profile: Profile | None = None
) -> tuple[float, float] | None:
    """Seconds between which nine of ten measured steps lie, by the runs published of the chips of ``groups``.

    Of several chips the widest. None where a chip has no published runs. ``profile``: what was measured of the cluster
    itself, which counts instead.
    """
    if profile is not None and profile.ranges:
        return _of_profile(seconds, profile)
    quantiles = [_residuals_of(group.device.name) for group in groups]
    chips = [chip for chip in quantiles if chip is not None]
    if not chips or len(chips) < len(quantiles):
        return None
    return seconds * min(chip.low for chip in chips), seconds * max(chip.high for chip in chips)


def _of_profile(seconds: float, profile: Profile) -> tuple[float, float]:
    ranges = [each for name, each in profile.ranges.items() if name != SAME_CALL]
    same = profile.ranges.get(SAME_CALL)
    calls = sum(each.calls for each in ranges) or 1
    middle = sum(each.calls * math.log(each.median) for each in ranges) / calls
    chips = published_residuals().values()
    runs = sum(chip.runs for chip in chips)

    def half_width(end: Literal["low", "high"]) -> float:
        kinds = [each.calls / calls * math.log(getattr(each, end) / each.median) for each in ranges]
        machine = 0.0 if same is None else math.log(getattr(same, end) / same.median)
        steps = sum(chip.runs * math.log(getattr(chip, end)) for chip in chips) / runs
        return math.hypot(*kinds, machine, steps)

    return seconds * math.exp(middle - half_width("low")), seconds * math.exp(middle + half_width("high"))


def _residuals_of(device: str) -> ResidualQuantiles | None:
    rows = published_residuals().values()
    return next((row for row in rows if any(part in device for part in row.devices)), None)
