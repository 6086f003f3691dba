"""What all sections of one graph share: placements, conversion trees and the choices of every operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from passes.ir.conversions import cuts, divides
from passes.ir.derived_values import state_derived
from passes.ir.graph import Graph, Node, Value
from passes.ir.types import I, MeshShape, Placement, R, local_shape, shard_dim
from passes.plan import ConversionPlan, Plan
from passes.repeats.repeated_blocks import BlockRun, folded_runs
from passes.rules.rule import INVARIANT, REPLICATE, AxisChoice, ShardingRule, axis_choices, gathers_rows
from passes.rules.uneven import can_run, cuts_of
from passes.shard.sharded_graph import Local, StateRef

RuleFor = Callable[[Node, Mapping[str, Value]], ShardingRule | None]


class PlanMismatch(ValueError):
    """The plan's model is this one, but it does not cover this graph (another mode or other arguments)."""


class UnitMismatch(PlanMismatch):
    """The units of a graph are not those of the plan's groups."""


class UndividedError(PlanMismatch):
    """The plan cuts a tensor of this graph into parts that are not equal, where they must be.

    ``axes``: the mesh axes over which.
    """

    def __init__(self, message: str, axes: tuple[str, ...]) -> None:
        super().__init__(message)
        self.axes = axes


def has_whole_gradient(placement: Placement, mesh: MeshShape) -> bool:
    """Whether each rank's gradient of an input that is placed so is the whole one, as its caller expects."""
    return all(size == 1 or spmd_type == I for size, spmd_type in zip(mesh.sizes, placement))


def input_key(path: tuple[str | int, ...]) -> str:
    """The name of an input in a plan: its path in the call, joined with dots."""
    return ".".join(map(str, path))


@dataclass
class Tree:
    """The conversions of one value: each placement that is reached, and the step that reaches it."""

    root: Placement
    steps: dict[Placement, ConversionPlan] = field(default_factory=dict)

    def chain(self, target: Placement, what: str) -> list[ConversionPlan]:
        """Steps from the root to ``target``, in order."""
        steps_back: list[ConversionPlan] = []
        while target != self.root:
            step = self.steps.get(target)
            if step is None or len(steps_back) > len(self.steps):
                raise PlanMismatch(f"the plan has no conversion of {what} to {target}")
            steps_back.append(step)
            target = step.source
        return steps_back[::-1]


class Context:
    """What all sections share: values, placements, conversion trees, operator choices."""

    def __init__(
        self, graph: Graph, plan: Plan, rule_for: RuleFor, *, wrap: Callable[[Tree, str, str], Tree] | None = None
    ) -> None:
        self.wrap = wrap or (lambda tree, *_: tree)
        self.graph = graph
        self.plan = plan
        self.mesh = plan.mesh
        self.rule_for = rule_for
        self.values = graph.values
        self.states = {state.value.name: state for state in graph.states}
        self.nodes = {node.name: node for node in graph.nodes}
        self.whole: Placement = (R,) * len(plan.mesh.names)
        _check_same_model(graph, plan)
        self._check_inputs()
        self.runs = self._runs()
        self._steps: dict[str, list[ConversionPlan]] = {}
        for conversion in plan.conversions:
            self._steps.setdefault(conversion.value, []).append(conversion)
        self.plan_keys = self._plan_keys()
        self._offered: dict[str, tuple[ShardingRule | None, list[list[bool]], dict[str, AxisChoice]]] = {}
        self.choices = {node.name: self._choices(node) for node in graph.nodes if not node.constant}
        self.trees = dict(self._trees())
        self.gathers = dict(self._gathers())

    def _runs(self) -> tuple[tuple[BlockRun, tuple[Placement, ...]], ...]:
        """The repeated blocks that the plan folds, with the placements of what they carry."""
        folded = folded_runs(self.graph, self.plan.blocks)
        if folded is None:
            begins = ", ".join(repr(block.first_node) for block in self.plan.blocks)
            raise PlanMismatch(f"this graph does not repeat the blocks of the plan: those that begin with {begins}")
        runs = []
        for run, block in zip(folded, self.plan.blocks):
            if len(run.carried) != len(block.carried):
                raise PlanMismatch(f"copies of {block.roots[0]} hand on other values than the plan says")
            entries = [self.values[names[0]] for names in run.carried]
            runs.append((run, tuple(map(self.normal, block.carried, entries))))
        return tuple(runs)

    def normal(self, placement: Placement, value: Value) -> Placement:
        """A placement as this graph sees it: axes of size 1 blanked out, and R for I where no gradient flows.

        A plan made for training so serves the same graph without gradients.
        """
        blank = (R,) if value.requires_grad else (R, I)
        return tuple(
            R if size == 1 or spmd_type in blank else spmd_type for size, spmd_type in zip(self.mesh.sizes, placement)
        )

    def local(self, value: Value, placement: Placement, state: StateRef | None = None) -> Local:
        if not cuts(placement, value.shape, self.mesh):
            self.check_divides(value, placement)
        return Local(value, placement, local_shape(value.shape, placement, self.mesh), state)

    def check_runs(self, node: Node) -> None:
        """Check that an operator can run on the parts that its axes cut, which may differ in length."""
        rule, choices = self.choices[node.name]
        inputs = [self.values[name] for name in node.inputs]
        if not can_run(node.op, cuts_of(rule, choices, inputs, node.outputs), self.mesh.sizes):
            tensors = [(value, input_placement(choices, index)) for index, value in enumerate(inputs)]
            tensors += [(value, output_placement(choices, index)) for index, value in enumerate(node.outputs)]
            for value, placement in tensors:
                self.check_divides(value, self.normal(placement, value))
            raise UndividedError(
                f"{node.op} ({node.key!r}) cannot be cut over the mesh {self.mesh} as the plan says: plan again for "
                "these shapes",
                self.mesh.names,
            )

    def check_divides(self, value: Value, placement: Placement) -> None:
        if divides(placement, value.shape, self.mesh):
            return
        paths = dict(zip((value.name for value in self.graph.inputs), self.graph.input_paths))
        what = f"input {input_key(paths[value.name])!r}" if value.name in paths else f"tensor {value.name!r}"
        for dim, size in enumerate(value.shape):
            axes = [name for name, spmd_type in zip(self.mesh.names, placement) if shard_dim(spmd_type) == dim]
            over = ", ".join(f"{name}={self.mesh.size(name)}" for name in axes)
            if axes and not divides(tuple(t if shard_dim(t) == dim else R for t in placement), value.shape, self.mesh):
                raise UndividedError(
                    f"{what} has size {size} in dim {dim}, which cannot be divided over mesh axis {over} as the plan "
                    "says: pad it to a multiple, or plan again for this shape",
                    tuple(axes),
                )

    def _check_inputs(self) -> None:
        for path, value in zip(self.graph.input_paths, self.graph.inputs):
            planned = self.plan.inputs.get(input_key(path))
            if planned is not None:
                self.check_divides(value, self.normal(planned.placement, value))

    def _plan_keys(self) -> dict[str, str]:
        """Node name → the key under which the plan knows it (that of the first copy, in a repeated block)."""
        keys = {node.name: node.key for node in self.graph.nodes}
        for run, _ in self.runs:
            for copy in run.copies[1:]:
                keys.update((name, self.nodes[first].key) for name, first in zip(copy, run.copies[0]))
        return keys

    def _choices(self, node: Node) -> tuple[ShardingRule | None, tuple[AxisChoice, ...]]:
        planned = self.plan.nodes.get(self.plan_keys[node.name])
        if planned is None or planned.op != node.op:
            raise PlanMismatch(f"the plan says nothing of {node.op} ({self.plan_keys[node.name]!r})")
        rule = self.rule_for(node, self.values) if planned.has_rule else None
        offered = self._offered_to(node, rule)
        missing = [label for label in planned.strategy if label not in offered]
        if missing:
            hint = "; register its rule again (planner.register_rule), in every process" if rule is None else ""
            raise PlanMismatch(f"{node.op} ({node.key!r}) cannot be sharded as the plan says: {missing[0]!r}{hint}")
        return rule, tuple(offered[label] for label in planned.strategy)

    def _gathers(self) -> Iterator[tuple[str, tuple[Node, ...]]]:
        """Node name → the linear layers that gather the rows of its input once, in the same copy of a block."""
        groups = {key: group for group in self.plan.shared_gathers for key in group}
        copy_of = {
            name: (index, number)
            for index, (run, _) in enumerate(self.runs)
            for number, copy in enumerate(run.copies)
            for name in copy
        }
        members: dict[tuple[object, ...], list[Node]] = {}
        for node in self.graph.nodes:
            group = groups.get(self.plan_keys[node.name])
            if group is not None:
                members.setdefault((group, copy_of.get(node.name)), []).append(node)
        for nodes in members.values():
            if len(nodes) > 1:
                self._check_gather(nodes)
                yield from ((node.name, tuple(nodes)) for node in nodes)

    def _check_gather(self, nodes: list[Node]) -> None:
        first, states = nodes[0], state_derived(self.graph)
        for node in nodes:
            choices = self.choices[node.name][1]
            is_alike = node.inputs[0] == first.inputs[0] and states.issuperset(node.inputs[1:])
            if not is_alike or not gathers_rows(choices):
                raise PlanMismatch(
                    f"{node.key!r} cannot share a gather with {first.key!r} as the plan says: plan again"
                )

    def _trees(self) -> Iterator[tuple[str, Tree]]:
        for path, value in zip(self.graph.input_paths, self.graph.inputs):
            planned = self.plan.inputs.get(input_key(path))
            if planned is None:
                raise PlanMismatch(f"the plan has no input {input_key(path)!r}")
            if value.requires_grad and not has_whole_gradient(planned.placement, self.mesh):
                raise PlanMismatch(f"the plan was made without a gradient for input {input_key(path)!r}")
            yield value.name, self.tree(f"input:{input_key(path)}", planned.placement, value)
        first_paths = self._first_paths()
        for state in self.graph.states:
            placed = self.plan.states.get(state.path)
            if placed is not None and state.value.requires_grad and not placed.trainable:
                raise PlanMismatch(f"the plan was made without a gradient for {state.path!r}")
            placement = self.whole if placed is None else placed.placement
            key = f"state:{first_paths.get(state.path, state.path)}"
            yield state.value.name, self.wrap(self.tree(key, placement, state.value), key, state.path)
        for node in self.graph.nodes:
            for index, value in enumerate(node.outputs):
                placement = self.whole if node.constant else output_placement(self.choices[node.name][1], index)
                yield value.name, self.tree(f"node:{self.plan_keys[node.name]}#{index}", placement, value)

    def _first_paths(self) -> dict[str, str]:
        return {
            self.states[name].path: self.states[names[0]].path
            for run, _ in self.runs
            for names in run.states
            for name in names
        }

    def tree(self, key: str, root: Placement, value: Value) -> Tree:
        """The conversions that the plan lists for ``value`` under ``key``."""
        tree = Tree(self.normal(root, value))
        for step in self._steps.get(key, ()):
            source, target = self.normal(step.source, value), self.normal(step.target, value)
            if source != target and target != tree.root:
                tree.steps.setdefault(target, dataclasses.replace(step, source=source, target=target))
        return tree

    def _offered_to(self, node: Node, rule: ShardingRule | None) -> dict[str, AxisChoice]:
        """The choices of one axis by their labels; those of a block's first copy where a later one has its rule."""
        tensors = [[self.values[name] for name in node.inputs], node.outputs]
        grads = [[value.requires_grad for value in values] for values in tensors]
        key = self.plan_keys[node.name]
        if key not in self._offered or self._offered[key][:2] != (rule, grads):
            offered = {choice.label: choice for choice in offered_choices(node, rule, self.values)}
            if INVARIANT not in offered:  # no gradient flows here: it says what "replicate" says
                offered[INVARIANT] = offered[REPLICATE]
            self._offered[key] = rule, grads, offered
        return self._offered[key][2]

    def carried_tree(self, run: int, slot: int, root: Placement, value: Value) -> Tree:
        """Conversions, inside a block, of values that it takes from the copy before it."""
        first = self.nodes[self.runs[run][0].copies[0][0]].key
        block = [block.first_node for block in self.plan.blocks].index(first)
        return self.tree(f"carry:{block}#{slot}", root, value)


def offered_choices(node: Node, rule: ShardingRule | None, values: Mapping[str, Value]) -> tuple[AxisChoice, ...]:
    """The choices of one mesh axis for ``node``; without a rule only to leave everything whole."""
    input_grads = [values[name].requires_grad for name in node.inputs]
    output_grads = [value.requires_grad for value in node.outputs]
    if rule is None:
        anything = ShardingRule(((),) * len(input_grads), ((),) * len(output_grads), {})
        return tuple(
            choice
            for choice in axis_choices(anything, input_grads=input_grads, output_grads=output_grads)
            if choice.label in (REPLICATE, INVARIANT)
        )
    return axis_choices(rule, input_grads=input_grads, output_grads=output_grads)


def input_placement(choices: tuple[AxisChoice, ...], index: int) -> Placement:
    return tuple(choice.inputs[index] for choice in choices)


def output_placement(choices: tuple[AxisChoice, ...], index: int) -> Placement:
    return tuple(choice.outputs[index] for choice in choices)


def _check_same_model(graph: Graph, plan: Plan) -> None:
    for state in graph.states:
        planned = plan.states.get(state.path)
        if planned is None and state.value.kind == "parameter":
            raise ValueError(
                f"a plan made for another model, or for another call: it was made for {plan.model}, which has or uses "
                f"no parameter {state.path!r} as this {graph.model_name} does; make it for a call (example_inputs) "
                "that uses all parameters"
            )
        if planned is not None and tuple(planned.shape) != state.value.shape:
            raise ValueError(
                f"a plan made for another model: {state.path!r} has shape {list(planned.shape)} in the plan for "
                f"{plan.model} and {list(state.value.shape)} in this {graph.model_name}"
            )
