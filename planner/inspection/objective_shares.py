"""Which seconds of a step's layers make up its objective, and how often each counts.

The closed form of a step (``cost_models.step_time``) is made of sums and maxima of the seconds of layers, with factors
and without constants. Where it is evaluated, every maximum is one of its terms, so the objective is a sum of layers'
seconds, each times a share. The form itself is run on seconds that remember what they are made of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from cost_models.step import ChunkCosts, PipelineStep
from cost_models.step_time import step_seconds


class SecondsOfStep(NamedTuple):
    """A field of ``LayerCosts`` of one layer, or of ``ChunkCosts`` (``layer`` −1)."""

    chunk: int
    layer: int
    field: str


class TracedSeconds(float):
    """Seconds that are a sum of parts: ``shares[part]`` times the part's own seconds each."""

    shares: Mapping[SecondsOfStep, float]

    def __new__(cls, seconds: float, shares: Mapping[SecondsOfStep, float]) -> TracedSeconds:
        traced = super().__new__(cls, seconds)
        traced.shares = shares
        return traced

    def __add__(self, other: float) -> TracedSeconds:
        more: Mapping[SecondsOfStep, float] = getattr(other, "shares", {})
        shares = dict(self.shares)
        for part, share in more.items():
            shares[part] = shares.get(part, 0.0) + share
        return TracedSeconds(float(self) + float(other), shares)

    def __mul__(self, factor: float) -> TracedSeconds:
        return TracedSeconds(float(self) * float(factor), {part: share * factor for part, share in self.shares.items()})

    def __sub__(self, other: float) -> TracedSeconds:
        return self + (-1.0 * other)

    def __rsub__(self, other: float) -> TracedSeconds:
        return -1.0 * self + other

    def __truediv__(self, divisor: float) -> TracedSeconds:
        return self * (1.0 / divisor)

    __radd__, __rmul__ = __add__, __mul__


def objective_shares(step: PipelineStep) -> Mapping[SecondsOfStep, float]:
    """How often the seconds of each field of each layer count in the objective; those that do not count are left out.

    ``Σ share × seconds`` is ``step_seconds(step).total``. A layer's seconds are those of one of its copies.
    """
    chunks = tuple(_traced(chunk, index) for index, chunk in enumerate(step.chunks))
    total = step_seconds(dataclasses.replace(step, chunks=chunks)).total
    return {part: share for part, share in getattr(total, "shares", {}).items() if share}


def seconds_at(step: PipelineStep, part: SecondsOfStep) -> float:
    """The seconds that a part stands for."""
    chunk = step.chunks[part.chunk]
    return float(getattr(chunk if part.layer < 0 else chunk.layers[part.layer][0], part.field))


def _traced(chunk: ChunkCosts, index: int) -> ChunkCosts:
    layers = tuple((_all_traced(layer, index, place), count) for place, (layer, count) in enumerate(chunk.layers))
    return _all_traced(dataclasses.replace(chunk, layers=layers), index, -1)


def _all_traced(costs: Any, chunk: int, layer: int) -> Any:
    """``costs`` (of a layer, or of a chunk) with every field of seconds traced."""
    names = [field.name for field in dataclasses.fields(costs) if field.name not in ("layers", "rows")]
    traced: dict[str, Any] = {
        name: TracedSeconds(getattr(costs, name), {SecondsOfStep(chunk, layer, name): 1.0})
        for name in names
        if not name.endswith("_bytes")
    }
    return dataclasses.replace(costs, **traced)
