"""What one copy of a unit costs under one sharding: seconds, bytes and parameters, and all its recompute policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from passes.ir.types import Placement
from passes.plan.step_plan import ON_HOST
from passes.repeats.model_units import ModelUnit

if TYPE_CHECKING:
    from passes.autograd.recompute_policies import Activations
    from passes.losses import Placed


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

    ``host_bytes``: what it keeps in the host's memory; ``launches``: operators and collectives that it runs again.
    """

    name: str
    compute: float
    communication: float
    saved_bytes: float
    peak_bytes: float
    host_bytes: float = 0.0
    launches: float = 0.0


@dataclass(frozen=True)
class UnitVariant:
    """A unit's operators as they run: under most policies as captured, or with the loss in chunks.

    ``placed`` are the placements of the operators' inputs and outputs, ``new_placements`` those of values that are not
    in the captured graph.
    """

    activations: Activations
    nodes: tuple[str, ...]
    placed: Mapping[str, Placed]
    new_placements: Mapping[str, Placement] = field(default_factory=dict)


class ConvertedCopy(NamedTuple):
    """A converted copy that the backward pass needs: its bytes, seconds and collectives to convert it again."""

    num_bytes: float
    seconds: float
    launches: int


class BytesBeside(NamedTuple):
    """What a unit holds under any policy beside the values that its operators give: converted copies, rows that visit
    experts, and what products that exchange their rows hold."""

    copies: Mapping[tuple[str, Placement], ConvertedCopy]
    visiting: float
    exchanged: float


@dataclass(frozen=True)
class UnitFigures:
    """One copy of a unit: seconds forward and backward by stream, the part of backward for weights, bytes sent on.

    ``entering_bytes`` are those of activations that cross a cut before a copy, ``returning_bytes`` of their gradients.
    ``launches``: kernels of operators that the host launches, forward and backward, ``collective_launches`` the same of
    collectives.
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
    launches: tuple[float, float] = (0.0, 0.0)
    collective_launches: tuple[float, float] = (0.0, 0.0)


def on_host(policy: Policy, *, staying: float) -> Policy:
    """``policy`` with what it keeps in the host's memory, all but ``staying`` bytes: what it took in.

    Beside what a unit makes, the device has what its neighbour made, on the way to the host or back: twice the bytes,
    of which none stay. That is of units in a row: one of a kind has nothing to move its bytes beside.
    """
    moving = policy.saved_bytes - staying
    return replace(
        policy, name=ON_HOST, saved_bytes=staying, peak_bytes=policy.peak_bytes + 2 * moving, host_bytes=moving
    )
