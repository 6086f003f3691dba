"""Plans written by hand for graphs written by hand: strategies are given, conversions are the shortest ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from passes.ir.conversions import Step, divides, steps_from
from passes.ir.fingerprint import fingerprint
from passes.ir.graph import ITEM_SIZE, Graph, Node, Ref, State, Value, assign_keys
from passes.ir.types import I, MeshShape, P, Placement, R, shard
from passes.plan import (
    BlockPlan,
    Certificate,
    CollectivePlan,
    ConversionPlan,
    Costs,
    NodePlan,
    Plan,
    TensorPlan,
)
from passes.repeats.repeated_blocks import find_blocks
from passes.rules import rule_for
from passes.shard.context import input_placement, offered_choices, output_placement
from planner.sharding_ilp.step_on_mesh import step_on_mesh


def mlp_graph(*, layers: int = 2, batch: int = 4, hidden: int = 8, dtype: str = "float64") -> Graph:
    """``layers`` × (up, gelu, down) and the mean of the squares as the loss."""
    x = Value("x", (batch, hidden), dtype, "input")
    states, nodes = [], []
    current, grad = x, False

    def add(
        name: str, op: str, args: tuple[object, ...], shape: tuple[int, ...], path: str = "", kind: str = ""
    ) -> Value:
        value = Value(name, shape, dtype, "node", True)
        nodes.append(Node(name, op, args, {}, (value,), path, kind))
        return value

    for index in range(layers):
        root = f"layers.{index}"
        for name, sizes in (("up", (4 * hidden, hidden)), ("down", (hidden, 4 * hidden))):
            weight = Value(f"{name}_weight_{index}", sizes, dtype, "parameter", True)
            bias = Value(f"{name}_bias_{index}", sizes[:1], dtype, "parameter", True)
            states += [State(weight, f"{root}.{name}.weight"), State(bias, f"{root}.{name}.bias")]
            path = f"{root}.{name}"
            current = add(
                f"linear_{name}_{index}", "aten.linear.default", (Ref(current.name), Ref(weight.name), Ref(bias.name)),
                (batch, sizes[0]), path, "Linear",
            )  # fmt: skip
            if name == "up":
                current = add(f"gelu_{index}", "aten.gelu.default", (Ref(current.name),), current.shape, root, "Mlp")
    square = add("square", "aten.mul.Tensor", (Ref(current.name), Ref(current.name)), current.shape)
    loss = add("loss", "aten.mean.default", (Ref(square.name),), ())
    del grad
    return Graph(
        "Mlp", (x,), (("x",),), tuple(states), assign_keys(tuple(nodes)),
        {"loss": loss.name, "out": current.name}, loss="loss",
        module_classes={f"layers.{index}": "Mlp" for index in range(layers)},
    )  # fmt: skip


def hand_plan(
    graph: Graph,
    mesh: MeshShape,
    *,
    strategies: Mapping[str, tuple[str, ...]],
    states: Mapping[str, Placement],
    inputs: Mapping[str, Placement],
    outputs: Mapping[str, Placement],
    carried: tuple[tuple[Placement, ...], ...] = (),
) -> Plan:
    """A plan with the given labels by node name, state placements by path, and so on; blocks folded as found."""
    maker = _Maker(graph, mesh, dict(strategies), dict(states), dict(inputs), carried)
    conversions = maker.conversions(outputs)
    return Plan(
        model=graph.model_name,
        fingerprint=fingerprint(graph),
        mesh=mesh,
        cluster={},
        training=graph.training,
        inputs={
            name: TensorPlan(value.shape, value.dtype, inputs[name])
            for name, value in ((".".join(map(str, p)), v) for p, v in zip(graph.input_paths, graph.inputs))
        },
        states={
            state.path: TensorPlan(
                state.value.shape, state.value.dtype, maker.state_placement(state.path), state.value.requires_grad
            )
            for state in graph.states
        },
        outputs={
            path: TensorPlan(graph.values[name].shape, graph.values[name].dtype, outputs[path])
            for path, name in graph.outputs.items()
        },
        nodes={
            node.key: NodePlan(node.op, strategies[node.name], maker.output_placements(node))
            for node in graph.nodes
            if node.name in strategies
        },
        conversions=conversions,
        blocks=tuple(
            BlockPlan(run.roots, maker.nodes[run.copies[0][0]].key, placements)
            for run, placements in zip(maker.runs, carried)
        ),
        collectives=collectives_of(conversions),
        costs=(costs := Costs(0.0, 0.0, 0.0, 0.0, {})),
        certificate=Certificate(0.0, 0.0, 0.0, "by hand", "none", 0, 0),
        step=step_on_mesh(graph, mesh=mesh, inputs={}, costs=costs, cluster={}, memory_limit=None),
    )


def collectives_of(conversions: tuple[ConversionPlan, ...]) -> tuple[CollectivePlan, ...]:
    """What the conversions issue in one training step."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for step in conversions:
        for phase, collective in (("forward", step.forward), ("backward", step.backward)):
            if collective:
                entry = sums.setdefault((collective, step.axis, phase), [0, 0])
                entry[0] += step.copies
                entry[1] += step.copies * step.num_bytes
    return tuple(CollectivePlan(*key, count=count, num_bytes=size) for key, (count, size) in sorted(sums.items()))


class _Maker:
    def __init__(self, graph, mesh, strategies, states, inputs, carried) -> None:  # type: ignore[no-untyped-def]
        self.graph, self.mesh = graph, mesh
        self.strategies, self.states, self.inputs = strategies, states, inputs
        self.values = graph.values
        self.nodes = {node.name: node for node in graph.nodes}
        self.runs = find_blocks(graph)[: len(carried)] if carried else ()
        self.carried = carried
        self.producer = {value.name: (node, i) for node in graph.nodes for i, value in enumerate(node.outputs)}
        self.state_paths = {state.value.name: state.path for state in graph.states}
        self.input_names = {
            value.name: ".".join(map(str, path)) for path, value in zip(graph.input_paths, graph.inputs)
        }

    def state_placement(self, path: str) -> Placement:
        for run in self.runs:
            for copies in run.states:
                paths = [self.state_paths[name] for name in copies]
                if path in paths:
                    return self.states[paths[0]]
        return self.states[path]

    def choices(self, node: Node):  # type: ignore[no-untyped-def]
        rule = rule_for(node, self.values)
        offered = {choice.label: choice for choice in offered_choices(node, rule, self.values)}
        return tuple(offered[label] for label in self.strategies[node.name])

    def output_placements(self, node: Node) -> tuple[Placement, ...]:
        return tuple(output_placement(self.choices(node), index) for index in range(len(node.outputs)))

    def root(self, name: str) -> Placement:
        if name in self.producer:
            node, index = self.producer[name]
            return output_placement(self.choices(node), index)
        if name in self.state_paths:
            return self.state_placement(self.state_paths[name])
        return self.inputs[self.input_names[name]]

    def key(self, name: str) -> str:
        if name in self.producer:
            node, index = self.producer[name]
            return f"node:{node.key}#{index}"
        if name in self.state_paths:
            return f"state:{self.state_paths[name]}"
        return f"input:{self.input_names[name]}"

    def conversions(self, outputs: Mapping[str, Placement]) -> tuple[ConversionPlan, ...]:
        conversion_plans: dict[tuple[str, Placement], ConversionPlan] = {}
        inner = {name: run for run in self.runs for name in run.copies[0]}
        skipped = {name for run in self.runs for copy in run.copies[1:] for name in copy}
        first = {
            late.name: early.name
            for run in self.runs
            for a, b in zip(run.copies[0], run.copies[-1])
            for early, late in zip(self.nodes[a].outputs, self.nodes[b].outputs)
        }
        for node in self.graph.nodes:
            if node.name in skipped:
                continue
            run = inner.get(node.name)
            for index, name in enumerate(node.inputs):
                need = input_placement(self.choices(node), index)
                if run is None:
                    name = first.get(name, name)
                    self.walk(conversion_plans, self.key(name), name, self.root(name), need, 1)
                    continue
                slots = [slot for slot, names in enumerate(run.carried) if names[0] == name]
                if slots:
                    number = self.runs.index(run)
                    root = self.carried[number][slots[0]]
                    self.walk(conversion_plans, f"carry:{number}#{slots[0]}", name, root, need, run.num_copies)
                else:
                    copies = 1 if name in run.shared else run.num_copies
                    self.walk(conversion_plans, self.key(name), name, self.root(name), need, copies)
        for number, run in enumerate(self.runs):
            for slot, name in enumerate(run.carried_output):
                carry = self.carried[number][slot]
                self.walk(conversion_plans, self.key(name), name, self.root(name), carry, run.num_copies - 1)
                entry = first.get(run.carried[slot][0], run.carried[slot][0])
                self.walk(conversion_plans, self.key(entry), entry, self.root(entry), carry, 1)
        for path, name in self.graph.outputs.items():
            name = first.get(name, name)
            self.walk(conversion_plans, self.key(name), name, self.root(name), outputs[path], 1)
        return tuple(conversion_plans.values())

    def walk(self, conversion_plans, key: str, name: str, root: Placement, target: Placement, copies: int) -> None:  # type: ignore[no-untyped-def]
        value = self.values[name]
        for step in path(root, target, value.shape, self.mesh):
            forward, backward = step.collectives
            size = step.num_bytes(value.shape, ITEM_SIZE[value.dtype], self.mesh)
            planned = ConversionPlan(
                key, self.mesh.names[step.axis], step.source, step.target, copies, forward,
                backward if value.requires_grad else None, size,
            )  # fmt: skip
            conversion = conversion_plans.get((key, step.target))
            if conversion is None or conversion.copies < copies:
                conversion_plans[key, step.target] = planned


def path(root: Placement, target: Placement, shape: tuple[int, ...], mesh: MeshShape) -> list[Step]:
    """Fewest steps from one placement to another."""
    types = (R, I, P, *(shard(dim) for dim in range(len(shape))))
    reached: dict[Placement, Step | None] = {root: None}
    queue = deque([root])
    while queue and target not in reached:
        for step in steps_from(queue.popleft(), mesh, [types] * len(root)):
            if step.target not in reached and divides(step.target, shape, mesh):
                reached[step.target] = step
                queue.append(step.target)
    steps: list[Step] = []
    while target != root:
        step = reached[target]
        assert step is not None
        steps.append(step)
        target = step.source
    return steps[::-1]
