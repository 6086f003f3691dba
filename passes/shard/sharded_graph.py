"""A graph with a plan applied, as data: what one rank computes, every change of type an explicit step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from passes.ir.conversions import Step
from passes.ir.graph import Graph, Node, Value
from passes.ir.types import MeshShape, Placement
from passes.plan import Plan
from passes.repeats.repeated_blocks import BlockRun
from passes.rules.rule import AxisChoice, ShardingRule


@dataclass(frozen=True)
class StateRef:
    """Where a section finds a state: below ``root`` (an index into the block's roots; None: the model itself)."""

    root: int | None
    path: str


@dataclass(frozen=True)
class Local:
    """One rank's part of ``value`` in ``placement``; ``shape`` is the local shape."""

    value: Value
    placement: Placement
    shape: tuple[int, ...]
    state: StateRef | None = None


@dataclass(frozen=True)
class Compute:
    """One operator on local tensors; ``gathers_with``: names of the linear layers of its input that gather its rows
    once, itself among them."""

    node: Node
    inputs: tuple[Local, ...]
    outputs: tuple[Local, ...]
    choices: tuple[AxisChoice, ...]
    rule: ShardingRule | None
    gathers_with: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Convert:
    """One change of type on one axis, with its collectives and the bytes each moves (``Step.num_bytes``)."""

    step: Step
    source: Local
    target: Local
    forward: str | None
    backward: str | None
    num_bytes: int


@dataclass(frozen=True)
class Section:
    """A straight stretch of operations, with its inputs and outputs."""

    arguments: tuple[Local, ...]
    body: tuple[Compute | Convert | Repeat, ...]
    results: tuple[Local, ...]

    @property
    def first_draw(self) -> int | None:
        """The lowest number of a random operator of its own, None if it has none."""
        operations = (operation for operation in self.body if isinstance(operation, Compute))
        return min((compute.node.draw for compute in operations if compute.node.draw is not None), default=None)


@dataclass(frozen=True)
class RepeatedBlock:
    """A section that is run once for each copy of a repeated block.

    ``roots[c]`` are the module paths of copy ``c``; the section's states are found below them. ``first_draws[c]`` is
    the number of its first random operator; empty if it has none. ``section_roots`` are those of the copy whose
    operators the section has, which need not be among ``roots``.
    """

    section: Section
    roots: tuple[tuple[str, ...], ...]
    module_class: str
    section_roots: tuple[str, ...]
    first_draws: tuple[int, ...] = ()


@dataclass(frozen=True)
class UnitPolicy:
    """What is recomputed of a unit in the backward pass, and its ZeRO stage."""

    recompute: str
    zero: int


@dataclass(frozen=True)
class Repeat:
    """A loop over the copies of a block.

    Attributes:
        block: the block.
        entries: what the first copy is given, one for each argument of the block.
        results: what the last copy gives, as the section around it knows it (one per result of the block).
        carried: for each argument that comes from the copy before, the index of the argument and what it is made
            of: a result of the block, followed by ``between``.
        between: conversions done between two copies, but not after the last; they refer to ``results``.
        policy: how the block runs as a unit of a step; None outside of steps.
    """

    block: RepeatedBlock
    entries: tuple[Local, ...]
    results: tuple[Local, ...]
    carried: tuple[tuple[int, Local], ...]
    between: tuple[Convert, ...]
    policy: UnitPolicy | None = None


@dataclass(frozen=True)
class ShardedGraph:
    """A graph with a plan applied.

    Attributes:
        constants: operators that depend on shapes alone; computed once, whole on every rank.
        main: the whole step; its results are the graph's outputs, in order.
        input_placements, state_placements: how inputs and states are held, by value name.
        runs: the repeated blocks that are folded, in the order of their ``Repeat``.
        batch_axis: the mesh axis that stands for micro-batches too, None if the whole batch is run at once. Its size
            is then that of the mesh axis times their number.
        part: which part of a step this is, for people.
    """

    graph: Graph
    plan: Plan
    constants: Section
    main: Section
    input_placements: Mapping[str, Placement]
    state_placements: Mapping[str, Placement]
    output_placements: Mapping[str, Placement]
    runs: tuple[BlockRun, ...] = ()
    batch_axis: str | None = None
    part: str = ""

    @property
    def mesh(self) -> MeshShape:
        return self.plan.mesh
