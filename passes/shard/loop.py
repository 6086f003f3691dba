"""Building a repeated block and the loop over its copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from passes.ir.graph import State
from passes.ir.types import Placement
from passes.plan import ConversionPlan
from passes.repeats.repeated_blocks import BlockRun
from passes.shard.context import Context, Tree, input_placement
from passes.shard.section import Body
from passes.shard.sharded_graph import Convert, Local, Repeat, RepeatedBlock, Section, StateRef


class BlockBody(Body):
    """The section of one block, written for its first copy."""

    def __init__(self, context: Context, index: int, run: BlockRun, carry: tuple[Placement, ...]) -> None:
        super().__init__(context, (context.nodes[name] for name in run.copies[0]))
        self.run = run
        self.carry = {names[0]: slot for slot, names in enumerate(run.carried)}
        self.carry_placements = carry
        self.carry_trees = [
            context.carried_tree(index, slot, placement, context.values[names[0]])
            for slot, (placement, names) in enumerate(zip(carry, run.carried))
        ]
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
    """Builds a block and the loop over its copies.

    A conversion that an inner use needs, or both the next copy and the exit, is done by every copy, in the block; one
    that only the next copy needs stands between two copies, one that only the exit needs behind the loop.
    """

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
        exits = self._exit_chains()
        self._convert_inside(exits)
        starts = [self._result(name, self._next_chain(slot)) for slot, name in enumerate(run.carried_output)]
        for name, chains in exits.items():
            for chain in chains:
                self._result(name, chain)
        section = Section(self._arguments(), tuple(body.body), tuple(self.results.values()))
        between: list[Convert] = []
        carried = tuple((slot, self._after_block(slot, start, between)) for slot, start in enumerate(starts))
        block = RepeatedBlock(section, run.roots, _class_of(run, self.context), run.roots[0], self._first_draws())
        results = tuple(self._outside(local) for local in section.results)
        return Repeat(block, self._entries(), results, carried, tuple(between))

    def _first_draws(self) -> tuple[int, ...]:
        """The first number of every copy's random operators: operators of a copy follow each other in the graph."""
        draws = [[self.context.nodes[name].draw for name in copy] for copy in self.run.copies]
        numbers = [[draw for draw in copy if draw is not None] for copy in draws]
        if not numbers[0]:
            return ()
        expected = range(numbers[0][0], numbers[-1][-1] + 1)
        assert [draw for copy in numbers for draw in copy] == list(expected), "copies draw one after the other"
        return tuple(copy[0] for copy in numbers)

    def exits(self) -> dict[str, dict[Placement, Local]]:
        """Values of the last copy that the section around may use, by name and placement."""
        exits_by_name: dict[str, dict[Placement, Local]] = {}
        for local in self.results.values():
            outside = self._outside(local)
            exits_by_name.setdefault(outside.value.name, {})[outside.placement] = outside
        return exits_by_name

    def _arguments(self) -> tuple[Local, ...]:
        carried = tuple(
            self.context.local(self.context.values[names[0]], placement)
            for names, placement in zip(self.run.carried, self.carry)
        )
        return (*carried, *self.body.shared.values())

    def _entries(self) -> tuple[Local, ...]:
        """The inputs of the first copy, converted in the section around the loop."""
        carried = tuple(self.main.get(names[0], placement) for names, placement in zip(self.run.carried, self.carry))
        return (*carried, *(self.main.get(name, placement) for name, placement in self.body.shared))

    def _exit_chains(self) -> dict[str, list[list[ConversionPlan]]]:
        """For each value of the block used behind the loop: the steps to every placement needed there."""
        context = self.context
        inside = set(self.run.copies[-1])
        first_name = {last: name for name, last in self.last_name.items()}
        chains: dict[str, dict[Placement, list[ConversionPlan]]] = {}
        for user, value_name, placement in _all_needs(context):
            name = first_name.get(value_name)
            if name is not None and user not in inside:
                target = context.normal(placement, context.values[name])
                chains.setdefault(name, {})[target] = context.trees[name].chain(target, name)
        return {name: list(chain_by_placement.values()) for name, chain_by_placement in chains.items()}

    def _next_chain(self, slot: int) -> list[ConversionPlan]:
        name = self.run.carried_output[slot]
        return self.context.trees[name].chain(self.carry[slot], name)

    def _convert_inside(self, exits: Mapping[str, list[list[ConversionPlan]]]) -> None:
        """Steps that both the next copy and the exit need belong to the block: every copy does them."""
        for slot, name in enumerate(self.run.carried_output):
            behind = {step.target for chain in exits.get(name, ()) for step in chain}
            for step in self._next_chain(slot):
                if step.target in behind:
                    self.body.get(name, step.target)

    def _result(self, name: str, chain: list[ConversionPlan]) -> Local:
        """The block's result to start ``chain`` from: the last placement on the way that it has."""
        have = self.body.there[name]
        on_the_way = [self.context.trees[name].root, *(step.target for step in chain)]
        start = [placement for placement in on_the_way if placement in have][-1]
        return self.results.setdefault((name, start), have[start])

    def _outside(self, local: Local) -> Local:
        return Local(self.context.values[self.last_name[local.value.name]], local.placement, local.shape)

    def _after_block(self, slot: int, start: Local, between: list[Convert]) -> Local:
        """The steps left from a result of the block to the carried placement."""
        current = self._outside(start)
        chain = self._next_chain(slot)
        places = [chain[0].source if chain else start.placement, *(step.target for step in chain)]
        for step in chain[places.index(start.placement) :]:
            current = self.main.convert(step, current, between)
        return current


def _all_needs(context: Context) -> Iterator[tuple[str, str, Placement]]:
    """(user, value name, placement) of every use in the graph; of what enters a loop, the placement that it carries."""
    entries = {
        (user, names[0]): placement
        for run, carry in context.runs
        for names, placement in zip(run.carried, carry)
        for user in run.copies[0]
    }
    for node in context.graph.nodes:
        if not node.constant:
            for index, name in enumerate(node.inputs):
                used = input_placement(context.choices[node.name][1], index)
                yield node.name, name, entries.get((node.name, name), used)
    for path, name in context.graph.outputs.items():
        planned = context.plan.outputs.get(path)
        if planned is not None:
            yield f"output:{path}", name, planned.placement


def _class_of(run: BlockRun, context: Context) -> str:
    """Class name of the module at the root of a block; of a block of several modules, that of the first."""
    root = run.roots[0][0]
    return context.graph.module_classes.get(root) or context.nodes[run.copies[0][0]].module_class or "Block"
