"""What the pattern pass reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Match:
    """What became a fused operator: the name of the pattern, and the module that computed it."""

    pattern: str
    module_path: str


@dataclass(frozen=True)
class NearMiss:
    """What nearly matched, and why not."""

    pattern: str
    module_path: str
    reason: str
