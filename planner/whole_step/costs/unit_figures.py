"""What one copy of a unit costs under one sharding: seconds, bytes and parameters, and all its recompute policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from passes.ir.types import Placement
from passes.plan.step_plan import ON_HOST
from passes.repeats.model_units import ModelUnit


@dataclass(frozen=True)
class Weight:
    """A parameter of one copy of a unit: elements on one device, dtype; ``uses``: units that use it (tied if several);
    ``shared``: the copies of the unit have it in common; ``expert``: a mixture's experts, which ``ep`` divides."""

    path: str
    elements: int
    dtype: str
    trainable: bool
    uses: tuple[int, ...]
    shared: bool
    expert: bool = False


@dataclass(frozen=True)
class Policy:
    """A recompute policy: seconds that it adds to backward (compute, communication), bytes kept, peak beyond them.

    ``host_bytes``: what it keeps in the host's memory.
    """

    name: str
    compute: float
    communication: float
    saved_bytes: float
    peak_bytes: float
    host_bytes: float = 0.0


class BytesBeside(NamedTuple):
    """What a unit holds under any policy beside the values that its operators give: converted copies, rows that visit
    experts, and what products that exchange their rows hold."""

    copies: Mapping[tuple[str, Placement], tuple[float, float]]
    visiting: float
    exchanged: float


@dataclass(frozen=True)
class UnitFigures:
    """One copy of a unit: seconds forward and backward by stream, the part of backward for weights, bytes sent on.

    ``entering_bytes`` are those of activations that cross a cut before a copy, ``returning_bytes`` of their gradients.
    """

    unit: ModelUnit
    compute: tuple[float, float]
    communication: tuple[float, float]
    weight_backward: float
    policies: tuple[Policy, ...]
    weights: tuple[Weight, ...]
    buffer_bytes: float
    entering_bytes: float
    returning_bytes: float


def on_host(compute: float, communication: float, kept_bytes: float, peak_bytes: float, *, staying: float) -> Policy:
    """What a unit costs that keeps ``kept_bytes`` in the host's memory, all but ``staying``: what it took in.

    Beside what a unit makes, the device has what its neighbour made, on the way to the host or back: twice the bytes,
    of which none stay. That is of units in a row: one of a kind has nothing to move its bytes beside.
    """
    moving = kept_bytes - staying
    return Policy(ON_HOST, compute, communication, staying, peak_bytes + 2 * moving, moving)
