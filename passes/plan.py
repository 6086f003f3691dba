"""The Plan: everything that was decided and every cost that was predicted, as plain data.

It is the only thing that crosses from deciding to doing. It is frozen, saved as versioned JSON, the same for the
same inputs, and loads without torch. Names in it: a node is named by its ``Node.key``; of a block that repeats, only
the first copy's nodes are named, and ``blocks`` lists the copies. A parameter or buffer is named by its path, an
input by its path in the call joined with dots.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from passes.ir.records import from_plain
from passes.ir.types import MeshShape, Placement
from passes.plan_checks import check_placements
from passes.plan_summary import summarise

PLAN_VERSION = 1


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


@dataclass(frozen=True)
class BlockPlan:
    """A run of identical blocks: the module paths of each copy, and the type of what each takes from the last."""

    roots: tuple[tuple[str, ...], ...]
    first_node: str
    carried: tuple[Placement, ...]


@dataclass(frozen=True)
class CollectivePlan:
    """How often a collective is issued in one training step on one axis, and the sum of its bytes."""

    collective: str
    axis: str
    phase: str
    count: int
    num_bytes: int


@dataclass(frozen=True)
class Costs:
    """Predicted seconds of one step by part, and bytes on each device by part."""

    compute_forward: float
    compute_backward: float
    communication_forward: float
    communication_backward: float
    memory: dict[str, int]

    @property
    def total(self) -> float:
        return self.compute_forward + self.compute_backward + self.communication_forward + self.communication_backward


@dataclass(frozen=True)
class Certificate:
    """How good the plan is within its model: seconds of the objective, a proved lower bound, and why it stopped."""

    objective: float
    bound: float
    gap: float
    status: str
    solver: str
    num_variables: int
    num_constraints: int


@dataclass(frozen=True)
class Plan:
    """A complete plan; see the module docstring for the naming of its parts."""

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
    constraints: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    version: int = PLAN_VERSION

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file appears whole or not at all."""
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        partial.write_text(self.to_json(), encoding="utf-8")
        partial.replace(target)

    def summary(self, *, operators: bool = False) -> str:
        """The plan as tables of text; ``operators`` adds one line per operator."""
        return summarise(self, operators=operators)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that ``save`` wrote.

        Raises:
            ValueError: if the file is missing, is not JSON, or is not a plan of this version.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read plan file {path}: {error}") from error
        except json.JSONDecodeError as error:
            raise ValueError(
                f"plan file {path} is corrupted: not JSON at line {error.lineno} ({error.msg}); make it again"
            ) from error
        try:
            return Plan.from_dict(data)
        except ValueError as error:
            raise ValueError(f"plan file {path} is corrupted or not a plan: {error}") from error

    @staticmethod
    def from_dict(data: Any) -> Plan:
        """The plan that ``json.loads(plan.to_json())`` describes.

        Raises:
            ValueError: if a field is missing, unknown or of the wrong kind, or types do not fit the mesh.
        """
        if not isinstance(data, dict):
            raise ValueError(f"expected a JSON object, got {type(data).__name__}")
        if data.get("version") != PLAN_VERSION:
            raise ValueError(
                f"plan version {data.get('version')!r} is not supported: this program reads version {PLAN_VERSION}; "
                "plan again"
            )
        plan = from_plain(Plan, data, where="plan")
        check_placements(plan)
        return plan
