"""A collective that an operator issues itself, priced."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One collective that an operator issues itself; ``in_pieces``: one of several that run beside its arithmetic."""

    collective: str
    axis: str
    phase: str
    num_bytes: int
    seconds: float
    in_pieces: bool = False
