"""What ``planner profile`` measured of a cluster: where, over which sizes, and how far its curves are off.

In a cluster file::

    [profile]
    machine = "node7: 8 × My GPU, torch 2.13.0"   # where it was measured, by which software
    [profile.ranges.matmul]                       # by kind of work, or collective and level of links
    unit = "flops"                                # of the two sizes: flops or bytes
    least = 6.6e4                                 # smallest and largest call that was measured
    most = 1.7e10
    calls = 9                                     # that the curves were not fitted to, and of those
    low = 0.93                                    # measured over predicted seconds: 5%,
    median = 1.01                                 # 50%
    high = 1.12                                   # and 95% quantile
    [profile.ranges."the same call"]              # one call, timed from time to time, over its median
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from cost_models.fields import Count, Positive, Text
from cost_models.records import from_plain

#: The range of one call that was timed again and again.
SAME_CALL = "the same call"
SizeUnit = Literal["flops", "bytes"]


@dataclass(frozen=True)
class MeasuredRange:
    """Sizes that were measured, and quantiles of measured over predicted seconds of ``calls`` that were not fitted.

    Attributes:
        unit: ``"flops"`` or ``"bytes"``, of ``least`` and ``most``.
        low, median, high: the 5%, 50% and 95% quantile.
    """

    unit: SizeUnit
    least: Positive
    most: Positive
    calls: Count
    low: Positive
    median: Positive
    high: Positive

    def beyond(self, size: float) -> float:
        """How many times as large as anything measured ``size`` is; 1 for what is not (short calls cost a latency)."""
        return max(1.0, size / self.most)


@dataclass(frozen=True)
class Profile:
    """Where a cluster's figures were measured, and ranges by kind of work (``"matmul"``, ``"host: all_reduce"``)."""

    machine: Text
    ranges: Mapping[str, MeasuredRange] = field(default_factory=dict)


class Extrapolation:
    """How far prices reach beyond what was measured: by range the size that lies furthest outside, and how far."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.furthest: dict[str, tuple[float, float]] = {}

    def note(self, name: str, size: float) -> None:
        """A call of ``size`` (in the range's unit) was priced; names without a range are not looked at."""
        measured = self.profile.ranges.get(name)
        if measured is None or not size:
            return
        factor = measured.beyond(size)
        if factor > max(1.0, self.furthest.get(name, (0.0, 1.0))[1]):
            self.furthest[name] = size, factor


def parse_profile(data: Any) -> Profile:
    """Read the table of the module docstring.

    Raises:
        ValueError: naming the field that is missing, unknown or malformed, and what was expected.
    """
    profile = from_plain(Profile, data, where="profile")
    for name, each in profile.ranges.items():
        if not (each.least <= each.most and each.low <= each.median <= each.high):
            raise ValueError(f"profile.ranges.{name}: expected least ≤ most and low ≤ median ≤ high")
    return profile


def format_profile(profile: Profile) -> dict[str, Any]:
    """The inverse of ``parse_profile``."""
    return {"machine": profile.machine, "ranges": {name: asdict(each) for name, each in profile.ranges.items()}}
