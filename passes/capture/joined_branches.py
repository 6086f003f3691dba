"""One graph that holds both branches of what a model decides by values: each is computed, and one is selected.

    if flag: y = f(x)        y = where(flag, f(where(flag, x, x.detach())), g(where(flag, x.detach(), x)))
    else:    y = g(x)

The branch that is not taken gets a gradient of zeros, of which an operator at the edge of its domain makes NaN
(``0 * inf``). So what goes into a branch passes its gradient on only where the branch is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from passes.capture.branch_pairs import BranchPairs, exclusive_nodes
from passes.capture.naming import Namer
from passes.ir.graph import Graph, Node, Ref, State, Value, assign_keys, map_refs


class JoinedBranches:
    """A graph to which the other branches are added, one after another.

    Args:
        graph: the first trace's.
        outputs: the values that it is asked for, by a name.

    Attributes:
        outputs: what is selected for them.
    """

    def __init__(self, graph: Graph, outputs: Mapping[object, str]) -> None:
        self.outputs = dict(outputs)
        self._graph = graph
        self._nodes = {node.name: node for node in graph.nodes}
        self._values = dict(graph.values)
        self._inputs = dict(zip(graph.input_paths, graph.inputs))
        self._states = list(graph.states)
        self._namer = Namer()
        for name in graph.values:
            self._namer.name(name)
        #: Values of branches of the first graph → what is selected in their place, for branches that come later.
        self._selected: dict[str, str] = {}
        #: What is selected → what it is with all the other answers.
        self._of_others: dict[str, str] = {}

    def add(self, other: Graph, pairs: BranchPairs, condition: str, *, when: bool) -> None:
        """Add what ``other`` computes.

        Args:
            pairs: how it differs from the first graph.
            condition: the flag that decides.
            when: what it is where ``other`` is right.
        """
        common = pairs.names
        own = exclusive_nodes(self._graph, (one for one, _ in pairs.joins.values()), common.values())
        self._pass_gradients(own, condition, when=not when)
        names = self._names_in(other, common)
        others = exclusive_nodes(other, (one for _, one in pairs.joins.values()), common)
        self._pass_gradients([self._copy(node, names) for node in others], condition, when=when)
        for name, node in pairs.matched.items():
            self._let_carry(self._nodes[name], node)
        self._join(pairs, names, condition, when=when)
        in_branch = {value.name for node in own for value in node.outputs}
        joins = ((self._operand(*user), one) for user, (one, _) in pairs.joins.items())
        self._selected.update((one, selected) for selected, one in joins if one in in_branch)

    def with_others(self) -> Graph:
        """What is computed with all the other answers; its outputs are by text."""
        nodes = []
        same: dict[str, str] = {}
        for node in self._in_order(self.outputs.values()):
            args, kwargs = map_refs((node.args, dict(node.kwargs)), lambda ref: Ref(same.get(ref.name, ref.name)))
            nodes.append(dataclasses.replace(node, args=args, kwargs=kwargs))
            if node.name in self._of_others:
                other = self._of_others[node.name]
                same[node.name] = same.get(other, other)
        outputs = {str(key): same.get(name, name) for key, name in self.outputs.items()}
        values = tuple(self._inputs.values())
        graph = self._graph.replace(inputs=values, input_paths=tuple(self._inputs), states=tuple(self._states))
        return graph.replace(nodes=tuple(nodes), outputs=outputs)

    def graph(self) -> Graph:
        """All of it."""
        nodes = self._in_order(self.outputs[path] for path in self._graph.outputs)
        used = {name for node in nodes for name in node.inputs} | set(self.outputs.values())
        inputs = {path: value for path, value in self._inputs.items() if value.name in used}
        return self._graph.replace(
            inputs=tuple(inputs.values()),
            input_paths=tuple(inputs),
            states=tuple(state for state in self._states if state.value.name in used),
            nodes=assign_keys(nodes),
            outputs={path: self.outputs[path] for path in self._graph.outputs},
        )

    def _names_in(self, other: Graph, common: Mapping[str, str]) -> dict[str, str]:
        """Values of ``other`` that are here, its own inputs and states among them → their names here."""
        names = {name: self._selected.get(here, here) for name, here in common.items()}
        for path, value in zip(other.input_paths, other.inputs):
            if value.name not in names:
                names[value.name] = self._inputs.setdefault(path, self._renamed(value)).name
        for state in other.states:
            if state.value.name not in names:
                names[state.value.name] = self._with_state(state).value.name
        return names

    def _with_state(self, state: State) -> State:
        paths, path = {each.path for each in self._states}, state.path
        while state.data is not None and path in paths:  # each trace numbers its own literals
            path += "_"
        self._states.append(dataclasses.replace(state, value=self._renamed(state.value), path=path))
        return self._states[-1]

    def _renamed(self, value: Value) -> Value:
        renamed = dataclasses.replace(value, name=self._namer.name(value.name))
        self._values[renamed.name] = renamed
        return renamed

    def _copy(self, node: Node, names: dict[str, str]) -> Node:
        """A node of another graph, added with new names."""
        outputs = tuple(map(self._renamed, node.outputs))
        args, kwargs = map_refs((node.args, dict(node.kwargs)), lambda ref: Ref(names[ref.name]))
        copied = dataclasses.replace(node, name=outputs[0].name, args=args, kwargs=kwargs, outputs=outputs)
        names.update((value.name, own.name) for value, own in zip(node.outputs, outputs))
        self._nodes[copied.name] = copied
        return copied

    def _pass_gradients(self, branch: list[Node], condition: str, *, when: bool) -> None:
        """Let gradients out of a branch only where ``condition`` is ``when``."""
        inside = {value.name for node in branch for value in node.outputs}
        passing: dict[str, str] = {}
        for node in branch:
            operands = {}
            for place, name in enumerate(self._nodes[node.name].inputs):
                if (
                    name not in inside
                    and self._values[name].requires_grad
                    and any(value.requires_grad for value in node.outputs)
                ):
                    passing[name] = passing.get(name) or self._passing(name, node, condition, when=when)
                    operands[place] = passing[name]
            self._set_operands(node.name, operands)

    def _passing(self, name: str, user: Node, condition: str, *, when: bool) -> str:
        value = self._values[name]
        without = self._new_node("aten.detach.default", (Ref(name),), value, user, gradient=False)
        choices = (name, without) if when else (without, name)
        passing = self._new_node("aten.where.self", (Ref(condition), *map(Ref, choices)), value, user, gradient=True)
        self._of_others[passing] = name
        return passing

    def _join(self, pairs: BranchPairs, names: Mapping[str, str], condition: str, *, when: bool) -> None:
        selected: dict[tuple[str, str], str] = {}
        producing = {value: node for node in self._nodes.values() for value in (each.name for each in node.outputs)}
        for (user, place), (_, other) in pairs.joins.items():
            here = self._operand(user, place)
            if (here, other) not in selected:
                then, like = names[other], self._values[here]
                choices = (then, here) if when else (here, then)
                gradient = like.requires_grad or self._values[then].requires_grad
                maker = producing.get(then) or producing.get(here)
                args = (Ref(condition), *map(Ref, choices))
                selected[here, other] = self._new_node("aten.where.self", args, like, maker, gradient=gradient)
                self._of_others[selected[here, other]] = then
            if user:
                self._set_operands(user, {place: selected[here, other]})
            else:
                self.outputs[place] = selected[here, other]

    def _operand(self, user: str, place: Any) -> str:
        return self._nodes[user].inputs[place] if user else self.outputs[place]

    def _new_node(self, op: str, args: tuple[Any, ...], like: Value, near: Node | None, *, gradient: bool) -> str:
        """The output of another node, in the module of the one that is ``near``."""
        value = self._renamed(Value(op.split(".")[1], like.shape, like.dtype, "node", gradient))
        place = ("", self._graph.model_name) if near is None else (near.module_path, near.module_class)
        self._nodes[value.name] = Node(value.name, op, args, {}, (value,), *place)
        return value.name

    def _set_operands(self, user: str, operands: Mapping[Any, str]) -> None:
        node = self._nodes[user]
        names = iter([operands.get(place, name) for place, name in enumerate(node.inputs)])
        args, kwargs = map_refs((node.args, dict(node.kwargs)), lambda ref: Ref(next(names)))
        self._nodes[user] = dataclasses.replace(node, args=args, kwargs=kwargs, constant=node.constant and not operands)

    def _let_carry(self, node: Node, other: Node) -> None:
        """Let a node that takes the place of two carry the gradient of both; it depends on what is selected."""
        outputs = tuple(
            dataclasses.replace(value, requires_grad=value.requires_grad or of_other.requires_grad)
            for value, of_other in zip(node.outputs, other.outputs)
        )
        self._values.update((value.name, value) for value in outputs)
        self._nodes[node.name] = dataclasses.replace(node, outputs=outputs, constant=False)

    def _in_order(self, outputs: Any) -> tuple[Node, ...]:
        """The nodes that outputs and buffers need, each behind those that it reads, else as they were traced."""
        nodes_of = {value.name: node for node in self._nodes.values() for value in node.outputs}
        order: dict[str, Node] = {}
        waiting = [*outputs, *(node.name for node in self._nodes.values() if node.writes_buffer)]
        needed: set[str] = set()
        while waiting:
            node = nodes_of.get(waiting.pop())
            if node is not None and node.name not in needed:
                needed.add(node.name)
                waiting += node.inputs
        stack = [name for name in reversed(self._nodes) if name in needed]
        while stack:
            node = nodes_of[stack[-1]]
            missing = [nodes_of[name].name for name in node.inputs if name in nodes_of]
            missing = [name for name in missing if name not in order]
            if missing:
                stack += missing
            else:
                order.setdefault(stack.pop(), node)
        return tuple(order.values())
