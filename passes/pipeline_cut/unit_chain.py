"""The operations of a sharded graph as a chain of parts: consecutive copies of a unit that run alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from passes.ir.graph import Graph, Node, Value
from passes.plan.step_plan import StepPlan
from passes.repeats.model_units import ModelUnit, find_units, made_anywhere, unit_of_nodes
from passes.repeats.repeated_blocks import BlockRun
from passes.shard import (
    Compute,
    Convert,
    Local,
    Repeat,
    RepeatedBlock,
    Section,
    StateRef,
    UnitMismatch,
    UnitPolicy,
)
from passes.shard.operations import Operation, made_by, used_by

#: Path of a parameter or buffer → the chunks that use it, in order, each with the policy of the unit that does.
Whereabouts = Mapping[str, Sequence[tuple[int, UnitPolicy]]]


@dataclass(frozen=True)
class ChainPart:
    """What one group of a plan does, in the chunk that it belongs to.

    ``before`` are conversions that only this part needs, ``behind`` those of what it hands to the next part.
    """

    chunk: int
    before: tuple[Operation, ...]
    repeat: Repeat
    behind: tuple[Operation, ...]

    @property
    def operations(self) -> tuple[Operation, ...]:
        return (*self.before, self.repeat, *self.behind)


def parts_of(
    graph: Graph,
    runs: Sequence[BlockRun],
    body: Sequence[Operation],
    step: StepPlan,
    *,
    where: Whereabouts | None = None,
) -> tuple[ChainPart, ...]:
    """The parts of ``body``, in order: the plan's groups or, if it is told ``where`` weights are, what goes with those.

    Raises:
        UnitMismatch: if the plan's groups are not the units of this graph.
    """
    groups = _planned(graph, runs, body, step) if where is None else by_weights(graph, runs, body, where)
    chain_parts: list[ChainPart] = []
    for chunk, policy, unit, operations, first, count in groups:
        if unit.run is None or not any(isinstance(one, Repeat) for one in operations):
            if operations:  # none: the loss does not depend on this unit
                chain_parts.append(ChainPart(chunk, (), _stretch(operations, unit, policy), ()))
            continue
        copies = _UnitCopies(graph, runs[unit.run], operations)
        chain_parts.append(copies.part(chunk, first, first + count, policy))
        handed_on = copies.handed_on() if first == 0 else ()
        if chain_parts[:-1] and handed_on:
            chain_parts[-2] = dataclasses.replace(chain_parts[-2], behind=(*chain_parts[-2].behind, *handed_on))
            remaining = tuple(step for step in chain_parts[-1].before if step not in handed_on)
            chain_parts[-1] = dataclasses.replace(chain_parts[-1], before=remaining)
    return tuple(chain_parts)


def _planned(
    graph: Graph, runs: Sequence[BlockRun], body: Sequence[Operation], step: StepPlan
) -> Iterator[tuple[int, UnitPolicy, ModelUnit, list[Operation], int, int]]:
    """Chunk, policy, unit, its operations, first copy and number of copies of every group of the plan."""
    units = find_units(graph, runs)
    pieces = _by_unit(body, units)
    unit = first = 0
    for index, chunk in enumerate(step.chunks):
        for group in chunk.groups:
            if unit >= len(units) or first + group.count > units[unit].count:
                raise UnitMismatch(f"the plan's stages do not fit this graph: there is no unit for {group.unit!r}")
            policy = UnitPolicy(group.runs_again, group.zero)
            yield index, policy, units[unit], pieces.get(unit, []), first, group.count
            first += group.count
            if first == units[unit].count:
                unit, first = unit + 1, 0
    if unit != len(units):
        raise UnitMismatch(f"the plan's stages do not fit this graph: {units[unit].name!r} is in none of them")


def _by_unit(body: Sequence[Operation], units: Sequence[ModelUnit]) -> Mapping[int, list[Operation]]:
    """The operations of every unit; a conversion belongs to what it is for, the next operator.

    Writes of buffers stand at the end of the graph; each belongs where its content is made.
    """
    unit_of = unit_of_nodes(units)
    operations_by_unit: dict[int, list[Operation]] = {}
    waiting: list[Operation] = []
    made_in: dict[str, int] = {}
    last = 0
    for operation in body:
        waiting.append(operation)
        if isinstance(operation, Convert):
            continue
        node = operation.node if isinstance(operation, Compute) else _first_compute(operation)
        if node.writes_buffer and node.inputs[1] in made_in:
            operations_by_unit[made_in[node.inputs[1]]].extend(waiting)
            waiting = []
            continue
        last = unit_of[node.name]
        if isinstance(operation, Compute):
            made_in.update((value.name, last) for value in node.outputs)
        operations_by_unit.setdefault(last, []).extend(waiting)
        waiting = []
    operations_by_unit.setdefault(last, []).extend(waiting)
    return operations_by_unit


def by_weights(
    graph: Graph, runs: Sequence[BlockRun], body: Sequence[Operation], where: Whereabouts
) -> Iterator[tuple[int, UnitPolicy, ModelUnit, list[Operation], int, int]]:
    """As ``_planned``, for a graph whose units are not the plan's: operators go with the weights that they use.

    What uses none stays with the operator before it, a conversion goes with the next one; nothing goes back to an
    earlier chunk.
    """
    units = find_units(graph, runs)
    pieces = _by_unit(body, units)
    paths = {state.value.name: state.path for state in graph.states}
    at = min((place for places in where.values() for place in places), default=(0, UnitPolicy("none", 0)), key=_chunk)

    def after(names: Iterable[str]) -> tuple[int, UnitPolicy]:
        """The first chunk from here on that has all weights among ``names`` (a tied one is in several), or else one."""
        places = [where[path] for path in (paths.get(name, "") for name in names) if path in where]
        candidates = [place for of_weight in places for place in of_weight if place[0] >= at[0]]
        having_all = set.intersection(*({place[0] for place in of_weight} for of_weight in places)) if places else set()
        best = [place for place in candidates if place[0] in having_all] or candidates
        return min(best, default=at, key=_chunk)

    for index, unit in enumerate(units):
        operations = pieces.get(index, [])
        if unit.run is None:
            stretch: list[Operation] = []
            waiting: list[Operation] = []
            for operation in operations:
                waiting.append(operation)
                if isinstance(operation, Convert):
                    continue
                place = after(operation.node.inputs) if isinstance(operation, Compute) else at
                if place != at and stretch:
                    yield *at, unit, stretch, 0, 1
                    stretch = []
                at = place
                stretch += waiting
                waiting = []
            stretch += waiting
            yield *at, unit, stretch, 0, 1
            continue
        states = runs[unit.run].states
        first = 0
        for copy in range(unit.count):
            place = after(names[copy] for names in states)
            if place != at and copy > first:
                yield *at, unit, operations, first, copy - first
                first = copy
            at = place
        yield *at, unit, operations, first, unit.count - first


def _chunk(place: tuple[int, UnitPolicy]) -> int:
    return place[0]


def _first_compute(repeat: Repeat) -> Node:
    return next(operation.node for operation in repeat.block.section.body if isinstance(operation, Compute))


def _stretch(operations: Sequence[Operation], unit: ModelUnit, policy: UnitPolicy) -> Repeat:
    """Operations between blocks as a block of their own with one copy, whose weights are the model's."""
    body = tuple(_inside(operation) for operation in operations)
    produced: dict[Local, None] = {}
    consumed: dict[Local, None] = {}
    for operation in operations:
        for local in used_by(operation):
            if local not in produced and local.state is None:
                consumed.setdefault(local)
        produced.update(dict.fromkeys(made_by(operation)))
    # What nobody uses is dropped when the chunk is put together.
    section = Section(tuple(consumed), body, tuple(produced))
    draws = () if section.first_draw is None else (section.first_draw,)
    block = RepeatedBlock(section, (("",),), _class_name(unit.name), ("",), draws)
    return Repeat(block, tuple(consumed), tuple(produced), (), (), policy)


def _inside(operation: Operation) -> Operation:
    """An operation of the main section as one of a block whose only root is the model."""
    if isinstance(operation, Compute):
        return dataclasses.replace(operation, inputs=tuple(map(_rooted, operation.inputs)))
    if isinstance(operation, Convert):
        return dataclasses.replace(operation, source=_rooted(operation.source))
    raise AssertionError("a block inside of a stretch")


def _rooted(local: Local) -> Local:
    if local.state is None:
        return local
    return dataclasses.replace(local, state=StateRef(0, local.state.path))


def _class_name(path: str) -> str:
    """``model.norm … lm_head`` → ``NormToLmHead``; a unit without a module path is the ``Rest`` of the model."""
    names = []
    for end in path.split(" … "):
        parts = [] if ":" in end else end.strip().split(".")
        tail = parts[-2:] if parts and parts[-1].isdigit() else parts[-1:]
        names.append("".join(word.capitalize() for part in tail for word in part.split("_")))
    return "To".join(name for name in names if name) or "Rest"


class _UnitCopies:
    """The copies of a repeated block, to be dealt out over parts."""

    def __init__(self, graph: Graph, run: BlockRun, operations: Sequence[Operation]) -> None:
        self.graph, self.run = graph, run
        at, self.repeat = next((at, one) for at, one in enumerate(operations) if isinstance(one, Repeat))
        # Behind it are conversions of what the graph ends with, if it ends with the block.
        self.entry, self.exit = list(operations[:at]), tuple(operations[at + 1 :])
        nodes = {node.name: node for node in graph.nodes}
        self.values = [[value for name in copy for value in nodes[name].outputs] for copy in run.copies]
        self.last = {value.name: index for index, value in enumerate(self.values[-1])}

    def part(self, chunk: int, first: int, end: int, policy: UnitPolicy) -> ChainPart:
        """Copies ``first`` to ``end`` - 1."""
        repeat = self.repeat
        entries = list(repeat.entries)
        if first:
            for slot, made_of in repeat.carried:
                entries[slot] = self._of_copy(made_of, first - 1)
        results = tuple(self._of_copy(local, end - 1) for local in repeat.results)
        between = tuple(self._convert(step, end - 1) for step in repeat.between)
        carried = tuple((slot, self._of_copy(local, end - 1)) for slot, local in repeat.carried)
        whole = repeat.block
        block = dataclasses.replace(whole, roots=whole.roots[first:end], first_draws=whole.first_draws[first:end])
        repeated_copies = Repeat(block, tuple(entries), results, carried, between, policy)
        behind = between if end < self.run.num_copies else self.exit
        return ChainPart(chunk, () if first else tuple(self.entry), repeated_copies, behind)

    def handed_on(self) -> tuple[Operation, ...]:
        """Conversions of what enters the first copy: the part before it does them, so that what is sent to a copy is
        the same in front of each. What every stage makes itself is converted where it is used."""
        easy = made_anywhere(self.graph)
        targets = {local for local in self.repeat.entries if local.state is None and local.value.name not in easy}
        conversions: list[Operation] = []
        for operation in reversed(self.entry):
            assert isinstance(operation, Convert)
            if operation.target in targets and operation.source.state is None:
                targets.add(operation.source)
                conversions.append(operation)
        return tuple(reversed(conversions))

    def _of_copy(self, local: Local, copy: int) -> Local:
        """A result of the last copy as ``copy`` gives it."""
        place = self.last.get(local.value.name)
        value: Value = local.value if place is None else self.values[copy][place]
        return dataclasses.replace(local, value=value)

    def _convert(self, convert: Convert, copy: int) -> Convert:
        source, target = self._of_copy(convert.source, copy), self._of_copy(convert.target, copy)
        return dataclasses.replace(convert, source=source, target=target)
