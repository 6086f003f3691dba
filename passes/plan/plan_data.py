"""What a plan is made of, as plain data.

Names in it: a node is named by its ``Node.key``; of a block that repeats, only
the first copy's nodes are named, and ``blocks`` lists the copies. A parameter or buffer is named by its path, an
input by its path in the call joined with dots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cost_models.short_text import ShortRepr
from passes.ir.types import MeshShape, Placement
from passes.plan.step_plan import StepPlan

PLAN_VERSION = 4
#: What follows the data axes in ``CollectivePlan.axis`` under hybrid sharding (``StepPlan.zero_ranks``): of the ranks
#: that hold all pieces together, and of those that hold the same.
OVER_PIECES, OVER_REPLICAS = "_shard", "_replicate"


@dataclass(frozen=True)
class TensorPlan:
    """An input, parameter, buffer or output: global shape, dtype, and its type on each mesh axis."""

    shape: tuple[int, ...]
    dtype: str
    placement: Placement
    trainable: bool = False
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodePlan:
    """One operator: what each mesh axis cuts (labels of ``AxisChoice``) and the types of its outputs."""

    op: str
    strategy: tuple[str, ...]
    outputs: tuple[Placement, ...]
    has_rule: bool = True


@dataclass(frozen=True)
class ConversionPlan:
    """One single-axis change of type of a value, done ``copies`` times a step (once per copy of its block).

    The conversions with the same ``value`` form a tree rooted at that value's own type; ``value`` is
    ``node:<key>#<output>``, ``state:<path>``, ``input:<path>`` or ``carry:<block>#<slot>`` (what a block takes from
    the copy before it, rooted at the slot's carried type). A value of a block has one tree for its uses inside the
    block, by the next copy and behind the block; a step is done by every copy if an inner use needs it or if both the
    next copy and the exit do, by all copies but the last if only the next copy does, once if only the exit does.

    ``backward`` is None also where the gradient of no use that goes through the step is ever asked for (the value
    needs none, or the loss does not depend on these uses).
    """

    value: str
    axis: str
    source: Placement
    target: Placement
    copies: int
    forward: str | None
    backward: str | None
    num_bytes: int


@dataclass(frozen=True, repr=False)
class BlockPlan(ShortRepr):
    """A run of identical blocks: the module paths of each copy, and the type of what each takes from the last."""

    roots: tuple[tuple[str, ...], ...]
    first_node: str
    carried: tuple[Placement, ...]


@dataclass(frozen=True)
class CollectivePlan:
    """How often a collective is issued in one training step on one axis, and the sum of its bytes.

    Of one device; with a pipeline, of one device of every stage together. ``axis`` names one mesh axis, or several with
    ``_`` between them where one group has the ranks of all, maybe with ``OVER_PIECES`` or ``OVER_REPLICAS`` behind
    them. ``phase`` is ``forward``, ``backward`` or, in the plan of a step, ``after``: once a step, behind all backward
    passes. Plans of a step list also what stages ``send`` each other.
    """

    collective: str
    axis: str
    phase: str
    count: int
    num_bytes: int


@dataclass(frozen=True, repr=False)
class Costs(ShortRepr):
    """Predicted seconds of one step by part, and bytes on each device by part."""

    compute_forward: float
    compute_backward: float
    communication_forward: float
    communication_backward: float
    memory: dict[str, int]

    @property
    def total(self) -> float:
        return self.compute_forward + self.compute_backward + self.communication_forward + self.communication_backward


@dataclass(frozen=True, repr=False)
class Certificate(ShortRepr):
    """How good the plan is within its model: seconds of the objective, a proved lower bound, and why it stopped.

    The bound is of all plans that meet ``demands``: what was asked of the search that the rest of the plan does not say
    (empty: something that no saved plan can say).
    """

    objective: float
    bound: float
    gap: float
    status: str
    solver: str
    num_variables: int
    num_constraints: int
    demands: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PatternPlan:
    """A pattern of fused operators: how often it was found (or nearly: then why not), and in which modules."""

    pattern: str
    count: int
    modules: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True, repr=False)
class FusionPlan(ShortRepr):
    """What the pattern pass did: operators, and bytes kept for the backward pass of the whole model, (before, after).

    Programs of the plan are made of graphs that went through it; ``tolerance`` is by how much a match may differ,
    ``registered`` names the patterns that people had registered (``planner.register_fusion``).
    """

    matches: tuple[PatternPlan, ...]
    near_misses: tuple[PatternPlan, ...]
    operators: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    tolerance: float = 1e-11
    registered: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanData:
    """The fields of a plan; see the module docstring for the naming of its parts.

    All parts but ``step`` and ``collectives`` are of one micro-batch. ``config_name``: name in the config library of
    the model that was planned ("": a model from elsewhere). ``shared_gathers``: groups of linear layers of one input
    that gather its rows once, the one that runs for all first.
    """

    model: str
    fingerprint: str
    mesh: MeshShape
    cluster: dict[str, Any]
    training: bool
    inputs: dict[str, TensorPlan]
    states: dict[str, TensorPlan]
    outputs: dict[str, TensorPlan]
    nodes: dict[str, NodePlan]
    conversions: tuple[ConversionPlan, ...]
    blocks: tuple[BlockPlan, ...]
    collectives: tuple[CollectivePlan, ...]
    costs: Costs
    certificate: Certificate
    step: StepPlan
    constraints: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    fusion: FusionPlan | None = None
    config_name: str = ""
    shared_gathers: tuple[tuple[str, ...], ...] = ()
    version: int = PLAN_VERSION
