"""Building a repeated block and the loop over its copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from passes.blocks import BlockRun
from passes.ir.graph import Node, State
from passes.ir.types import Placement
from passes.plan import ConversionPlan
from passes.shard.context import Context, Tree, input_placement
from passes.shard.data import Block, Convert, Local, Repeat, Section, StateRef
from passes.shard.section import Body


class BlockBody(Body):
    """The section of one block, written for its first copy."""

    def __init__(self, context: Context, index: int, run: BlockRun, carry: tuple[Placement, ...]) -> None:
        super().__init__(context)
        self.run = run
        self.carry = {names[0]: slot for slot, names in enumerate(run.carried)}
        self.carry_placements = carry
        self.carry_trees = [context.carried_tree(index, slot, placement) for slot, placement in enumerate(carry)]
        self.own_states = {names[0] for names in run.states}
        self.inside = {value.name for name in run.copies[0] for value in context.nodes[name].outputs}
        self.shared: dict[tuple[str, Placement], Local] = {}

    def tree(self, name: str) -> Tree:
        slot = self.carry.get(name)
        return super().tree(name) if slot is None else self.carry_trees[slot]

    def origin(self, name: str, placement: Placement) -> Local | None:
        context = self.context
        if name in self.inside:
            return None
        if name in self.carry:
            return context.local(context.values[name], self.carry_placements[self.carry[name]])
        if name in self.own_states:
            state = context.states[name]
            return context.local(state.value, self.tree(name).root, self._state_ref(state))
        return self.shared.setdefault((name, placement), context.local(context.values[name], placement))

    def _state_ref(self, state: State) -> StateRef:
        for index, root in enumerate(self.run.roots[0]):
            if state.path.startswith(f"{root}."):
                return StateRef(index, state.path[len(root) + 1 :])
        raise AssertionError(f"{state.path} is not below {self.run.roots[0]}")


class Loop:
    """Builds a block and the loop over its copies."""

    def __init__(self, main: Body, index: int, run: BlockRun, carry: tuple[Placement, ...]) -> None:
        self.main = main
        self.context = main.context
        self.run = run
        self.carry = carry
        self.body = BlockBody(self.context, index, run, carry)
        self.results: dict[tuple[str, Placement], Local] = {}
        nodes = self.context.nodes
        self.last_name = {
            value.name: last.name
            for first, final in zip(run.copies[0], run.copies[-1])
            for value, last in zip(nodes[first].outputs, nodes[final].outputs)
        }

    def build(self) -> Repeat:
        run, body = self.run, self.body
        for name in run.copies[0]:
            body.compute(self.context.nodes[name])
        exit_needs = self._exit_needs()
        self._convert_inside(exit_needs)
        carried_from = [self._carried_from(slot) for slot in range(len(run.carried))]
        for name, placements in exit_needs.items():
            for placement in placements:
                self._result(name, placement)
        section = Section(self._arguments(), tuple(body.body), tuple(self.results.values()))
        between: list[Convert] = []
        carried = tuple((slot, self._after_block(slot, start, between)) for slot, start in enumerate(carried_from))
        entries = self._entries()
        first_node = self.context.nodes[run.copies[0][0]]
        block = Block(section, run.roots, _class_of(first_node, run, self.context))
        results = tuple(self._outside(local) for local in section.results)
        return Repeat(block, entries, results, carried, tuple(between))

    def _arguments(self) -> tuple[Local, ...]:
        carried = tuple(
            self.context.local(self.context.values[names[0]], placement)
            for names, placement in zip(self.run.carried, self.carry)
        )
        return (*carried, *self.body.shared.values())

    def _entries(self) -> tuple[Local, ...]:
        """What the first copy is given, converted in the section around the loop."""
        carried = tuple(self.main.get(names[0], placement) for names, placement in zip(self.run.carried, self.carry))
        return (*carried, *(self.main.get(name, placement) for name, placement in self.body.shared))

    def _exit_needs(self) -> dict[str, list[Placement]]:
        """Placements in which values of the last copy are needed after the loop, by the first copy's names."""
        context = self.context
        inside = set(self.run.copies[-1])
        needs: dict[str, dict[Placement, None]] = {}
        first_name = {last: name for name, last in self.last_name.items()}
        for name, placement in _all_needs(context):
            user, value_name = name
            if value_name in first_name and user not in inside:
                needs.setdefault(first_name[value_name], {})[context.normal(placement)] = None
        return {name: list(placements) for name, placements in needs.items()}

    def _chain(self, name: str, target: Placement) -> list[ConversionPlan]:
        return self.context.trees[name].chain(target, name)

    def _convert_inside(self, exit_needs: Mapping[str, list[Placement]]) -> None:
        """Conversions that both the next copy and the exit need belong to the block: every copy does them."""
        for slot, name in enumerate(self.run.carried_output):
            exit_targets = {step.target for need in exit_needs.get(name, ()) for step in self._chain(name, need)}
            for step in self._chain(name, self.carry[slot]):
                if step.target in exit_targets:
                    self.body.get(name, step.target)

    def _result(self, name: str, placement: Placement) -> Local:
        """The block's result to start from towards ``placement``: the last one on the way that it has."""
        have = self.body.there[name]
        starts = [self.context.trees[name].root, *(step.target for step in self._chain(name, placement))]
        start = [candidate for candidate in starts if candidate in have][-1]
        return self.results.setdefault((name, start), have[start])

    def _carried_from(self, slot: int) -> Local:
        return self._result(self.run.carried_output[slot], self.carry[slot])

    def _outside(self, local: Local) -> Local:
        value = self.context.values[self.last_name[local.value.name]]
        return Local(value, local.placement, local.shape)

    def _after_block(self, slot: int, start: Local, between: list[Convert]) -> Local:
        """The steps left from a result of the block to the carried placement."""
        current = self._outside(start)
        done = {(convert.source, convert.target.placement): convert.target for convert in between}
        for step in self._chain(self.run.carried_output[slot], self.carry[slot]):
            if step.source != current.placement:
                continue
            known = done.get((current, step.target))
            current = known if known is not None else self.main.convert(step, current, between)
        return current

    def exits(self) -> dict[str, dict[Placement, Local]]:
        """Values of the last copy that the section around may use, by name and placement."""
        found: dict[str, dict[Placement, Local]] = {}
        for local in self.results.values():
            outside = self._outside(local)
            found.setdefault(outside.value.name, {})[outside.placement] = outside
        return found


def _all_needs(context: Context) -> Iterator[tuple[tuple[str, str], Placement]]:
    """((user, value name), placement) of every use in the graph."""
    for node in context.graph.nodes:
        if not node.constant:
            for index, name in enumerate(node.inputs):
                yield (node.name, name), input_placement(context.choices[node.name][1], index)
    for path, name in context.graph.outputs.items():
        planned = context.plan.outputs.get(path)
        if planned is not None:
            yield (f"output:{path}", name), planned.placement


def _class_of(node: Node, run: BlockRun, context: Context) -> str:
    """Class name of the module at the root of a block, as far as the nodes tell."""
    root = run.roots[0][0]
    for name in run.copies[0]:
        candidate = context.nodes[name]
        if candidate.module_path == root and candidate.module_class:
            return candidate.module_class
    return node.module_class or "Block"
