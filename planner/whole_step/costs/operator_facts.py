"""What the price of an operator depends on beside how it is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cost_models.efficiency import ANY_ROWS
from passes.ir.graph import Node, Value
from passes.rules.expert_rules import is_experts
from passes.rules.kinds import MATMUL, kind_of, matmul_shape, row_step
from planner.sharding_ilp.sharding_prices import is_view, table_read_by_rows


@dataclass(frozen=True)
class Fusion:
    """What compiled code keeps in registers: (node, input) pairs that it does not read, values it does not write."""

    reads: frozenset[tuple[str, str]] = frozenset()
    writes: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Likeness:
    """The same object for all operators of one table that are priced alike where they are cut alike.

    A search looks prices up by it a hundred thousand times, for which ``parts`` would be hashed again each time.
    """

    parts: tuple[object, ...]


@dataclass(frozen=True)
class OperatorFacts:
    """What an operator's price depends on beside its choice.

    Attributes:
        node: kept, as facts are remembered by its id.
        written, read: the outputs that are written and the inputs that are read: place, value.
        table: the input of which only rows are read, if it is one of these.
        with_gradient: the inputs that are read and have a gradient, as often as they are taken.
        grads: names of all inputs that have one.
        row_step: of a matrix product with its whole operands, see ``passes.rules.kinds``.
        likeness: the same for operators that are priced alike where they are cut alike, in one ``OperatorTable``.
    """

    node: Node
    is_view: bool
    is_experts: bool
    kind: str
    written: tuple[tuple[int, Value], ...]
    read: tuple[tuple[int, Value], ...]
    table: str | None
    with_gradient: tuple[tuple[int, Value], ...]
    grads: tuple[str, ...]
    row_step: int
    likeness: Likeness

    @staticmethod
    def of(node: Node, values: Mapping[str, Value], fusion: Fusion) -> OperatorFacts:
        kind, is_mixture = kind_of(node), is_experts(node)
        operands = [(place, values[name]) for place, name in enumerate(node.inputs)]
        read = [(place, value) for place, value in operands if (node.name, value.name) not in fusion.reads]
        step = ANY_ROWS
        if kind == MATMUL and not is_mixture and not is_view(node):
            step = row_step(matmul_shape(node, [value.shape for _, value in operands], node.output.shape))
        return OperatorFacts(
            node=node,
            is_view=is_view(node),
            is_experts=is_mixture,
            kind=kind,
            written=tuple((at, value) for at, value in enumerate(node.outputs) if value.name not in fusion.writes),
            read=tuple({value.name: (place, value) for place, value in read}.values()),
            table=table_read_by_rows(node),
            with_gradient=tuple((place, value) for place, value in read if value.requires_grad),
            grads=tuple(name for name in dict.fromkeys(node.inputs) if values[name].requires_grad),
            row_step=step,
            likeness=Likeness(_likeness(node, values, fusion)),
        )


class OperatorTable:
    """The facts of every operator of one graph, worked out once for all cuts; alike ones have one likeness."""

    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion
        self._facts: dict[int, OperatorFacts] = {}
        self._likenesses: dict[tuple[object, ...], Likeness] = {}

    def of(self, node: Node, values: Mapping[str, Value]) -> OperatorFacts:
        """The facts of ``node``."""
        facts = self._facts.get(id(node))
        if facts is None:
            facts = OperatorFacts.of(node, values, self.fusion)
            shared = self._likenesses.setdefault(facts.likeness.parts, facts.likeness)
            facts = self._facts[id(node)] = replace(facts, likeness=shared)
        return facts


def _likeness(node: Node, values: Mapping[str, Value], fusion: Fusion) -> tuple[object, ...]:
    """All that the price of an operator depends on but how it is cut."""
    names = node.inputs
    operands = tuple(
        (value.shape, value.dtype, value.requires_grad, names.index(name), (node.name, name) in fusion.reads)
        for name in names
        for value in (values[name],)
    )
    results = tuple((value.shape, value.dtype, value.name in fusion.writes) for value in node.outputs)
    return node.op, node.constants, operands, results
