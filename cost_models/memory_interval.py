"""The interval of a predicted peak of memory: how far plans that filled such devices were from their predictions.

``presets/residuals/filled_devices.toml`` has, for each chip, the bytes that PyTorch's allocator reserved at most over
those that were predicted. Nothing was fitted to these runs as a whole; faults that six of them showed were mended.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from cost_models.hardware import DeviceGroup
from cost_models.step_interval import NOMINAL_SHARE


@dataclass(frozen=True)
class FilledDevices:
    """Of one kind of chip: measured over predicted bytes.

    Attributes:
        devices: parts of the names of devices that have the chip.
        ratios: of each plan that was run.
    """

    devices: tuple[str, ...]
    ratios: tuple[float, ...]

    @property
    def quantiles(self) -> tuple[float, float]:
        """Ratios that ``NOMINAL_SHARE`` of the runs lie between."""
        hundredths = statistics.quantiles(self.ratios, n=100)
        tail = round(100 * (1.0 - NOMINAL_SHARE) / 2)
        return hundredths[tail - 1], hundredths[-tail]


@cache
def filled_devices() -> Mapping[str, FilledDevices]:
    """Chip → what its plans took."""
    file = resources.files("cost_models.presets") / "residuals" / "filled_devices.toml"
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    return {chip: FilledDevices(tuple(row["devices"]), tuple(row["ratios"])) for chip, row in table.items()}


def memory_interval(num_bytes: float, groups: Iterable[DeviceGroup]) -> tuple[float, float] | None:
    """Bytes between which nine of ten peaks of the allocator lie, of ``num_bytes`` that are predicted.

    Of several chips the widest. None where a chip has no such runs.
    """
    names = [group.device.name for group in groups]
    chips = [row for name in names for row in filled_devices().values() if any(part in name for part in row.devices)]
    if not chips or len(chips) < len(names):
        return None
    lows, highs = zip(*(chip.quantiles for chip in chips))
    return num_bytes * min(lows), num_bytes * max(highs)
