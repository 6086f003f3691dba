"""A section's operators as the statements that a person would write: views on the line of what they are views of, and
sisters (queries, keys and values; gate and up) side by side.

Only the order of operators without effects changes: a view goes up to what it is a view of, and sisters to the first of
them, with what is done to their weights alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from passes.chains import OperatorChain
from passes.emit.roles import operator
from passes.shard import Compute, Convert, Local, Repeat, Section
from passes.shard.operations import made_by, used_by

#: Operators that are written as a method of their only tensor, behind what computes it.
METHODS = frozenset(
    (
        "view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "swapaxes",
        "permute", "expand", "contiguous", "to", "_to_copy", "t", "mT", "slice", "select", "broadcast_to",
    )
)  # fmt: skip
#: Roles of values that are computed alike from one tensor.
SISTERS = (("q", "k", "v"), ("gate", "up"), ("cos", "sin"))


@dataclass
class Statement:
    """An operator, and the views of its result that are written behind it: ``F.linear(h, w).unflatten(…)``."""

    compute: Compute
    views: list[Compute] = field(default_factory=list)

    @property
    def is_view(self) -> bool:
        """Whether it computes nothing."""
        return _viewed(self.compute) is not None and self.compute.inputs[0].state is None

    @property
    def outputs(self) -> tuple[Local, ...]:
        return self.views[-1].outputs if self.views else self.compute.outputs

    @property
    def inputs(self) -> tuple[Local, ...]:
        return self.compute.inputs


@dataclass
class Sisters:
    """Statements that are written in one line where there is room."""

    members: list[Statement]

    @property
    def outputs(self) -> tuple[Local, ...]:
        return tuple(local for member in self.members for local in member.outputs)

    @property
    def inputs(self) -> tuple[Local, ...]:
        return tuple(local for member in self.members for local in member.inputs)


Item = Statement | Sisters | Convert | Repeat


def statements_of(section: Section, role: Callable[[Local], str]) -> list[Item]:
    """The section's body as statements, in an order in which they can be run."""
    return _side_by_side(_with_views(section), role)


def taken_by(item: Item) -> tuple[Local, ...]:
    """What a statement reads."""
    return item.inputs if isinstance(item, (Statement, Sisters)) else used_by(item)


def given_by(item: Item) -> tuple[Local, ...]:
    """What a statement assigns."""
    return item.outputs if isinstance(item, (Statement, Sisters)) else made_by(item)


def _with_views(section: Section) -> list[Item]:
    uses = Counter(local for operation in section.body for local in used_by(operation))
    uses.update(section.results)
    for operation in section.body:
        if isinstance(operation, Repeat):
            uses.update(step.source for step in operation.between)
    items: list[Item] = []
    ends: dict[Local, Statement] = {}
    for operation in section.body:
        if not isinstance(operation, Compute):
            items.append(operation)
            continue
        source = _viewed(operation)
        statement = ends.pop(source, None) if source is not None and uses[source] == 1 else None
        if statement is None:
            statement = Statement(operation)
            items.append(statement)
        else:
            statement.views.append(operation)
        if len(operation.outputs) == 1:
            ends[operation.outputs[0]] = statement
    return items


def _viewed(compute: Compute) -> Local | None:
    """What a view is a view of, if it is one and takes nothing else."""
    is_view = not isinstance(compute, OperatorChain) and operator(compute.node) in METHODS
    return compute.inputs[0] if is_view and len(compute.inputs) == 1 and len(compute.outputs) == 1 else None


def _side_by_side(items: Sequence[Item], role: Callable[[Local], str]) -> list[Item]:
    ordered_items: list[Item] = []
    remaining = list(items)
    while remaining:
        first = remaining.pop(0)
        names = _sisters_of(first, role)
        members = [first] if isinstance(first, Statement) and names else []
        moved: list[Item] = []
        if members:
            _collect(remaining, members, moved, names, role)
        if len(members) < 2:
            ordered_items.append(first)
            continue
        handled = {id(item) for item in (*members, *moved)}
        remaining = [item for item in remaining if id(item) not in handled]
        ordered = sorted(members, key=lambda member: names.index(role(member.outputs[0])))
        ordered_items += [*moved, Sisters(ordered)]
    return ordered_items


def _sisters_of(item: Item, role: Callable[[Local], str]) -> tuple[str, ...]:
    if not isinstance(item, Statement) or isinstance(item.compute, OperatorChain) or len(item.outputs) != 1:
        return ()
    return next((names for names in SISTERS if role(item.outputs[0]) in names), ())


def _collect(
    remaining: Sequence[Item],
    members: list[Statement],
    moved: list[Item],
    names: Sequence[str],
    role: Callable[[Local], str],
) -> None:
    """Add the sisters of ``members[0]`` among ``remaining``, and to ``moved`` what they need done before."""
    first = members[0]
    makers: dict[Local, Item] = {}
    for item in remaining:
        item_role = role(item.outputs[0]) if isinstance(item, Statement) and len(item.outputs) == 1 else ""
        if isinstance(item, Statement) and item_role in names and item.compute.node.op == first.compute.node.op:
            needs = _needs(item, makers, members)
            alike = {_argument(member) for member in (first, item)}
            if (
                needs is not None
                and item_role not in map(role, _outputs(members))
                and (len(alike) == 1 or not _weighs(item))
            ):
                members.append(item)
                moved += [need for need in needs if need not in moved]
                continue
        makers.update(dict.fromkeys(given_by(item), item))


def _outputs(members: Iterable[Statement]) -> list[Local]:
    return [member.outputs[0] for member in members]


def _weighs(item: Statement) -> bool:
    return operator(item.compute.node) == "linear"


def _argument(item: Statement) -> Local | None:
    """The first tensor that a statement takes."""
    return next(iter(item.inputs), None)


def _needs(item: Statement, makers: dict[Local, Item], members: Sequence[Statement]) -> list[Item] | None:
    """What has to move with ``item`` to before ``makers``: work on weights alone; None if there is more."""
    needs: list[Item] = []
    waiting = list(item.inputs)
    members_outputs = _outputs(members)
    while waiting:
        local = waiting.pop()
        if local in members_outputs:
            return None
        maker = makers.get(local)
        if maker is None or maker in needs:
            continue
        inputs = taken_by(maker)
        if isinstance(maker, Repeat) or not all(local.state is not None or local in makers for local in inputs):
            return None
        needs.insert(0, maker)
        waiting += inputs
    return needs
