"""On random small graphs the ILP's objective equals exhaustive enumeration, written independently of it."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Mapping

import pytest

from passes.ir.conversions import Step, divides, steps_from
from passes.ir.graph import Graph, Node, Ref, State, Value, assign_keys
from passes.ir.types import MeshShape, Placement
from passes.rules import forward_flops, rule_for
from passes.rules.rule import AxisChoice, axis_choices
from planner.auditing.graph_walk import price
from planner.sharding_ilp import search
from planner.sharding_ilp.sharding_prices import Pricing
from tests.search_cases import UnitCosts

INFINITE = float("inf")


class Random:
    """Builds a random graph of linears, additions, products, activations and a mean at the end."""

    def __init__(self, seed: int, num_nodes: int) -> None:
        self.random = random.Random(seed)
        rows, cols = self.random.choice([(8, 16), (64, 8), (4, 4)])
        self.size = cols
        self.inputs = (Value("x", (rows, cols), "float32", "input"),)
        self.states: list[State] = []
        self.nodes: list[Node] = []
        self.tensors = [self.inputs[0]]
        for index in range(num_nodes - 1):
            self.add_node(f"n{index}")
        last = self.tensors[-1]
        unused = [t for t in self.tensors[1:-1] if not any(t.name in node.inputs for node in self.nodes)]
        outputs = {f"out{i}": t.name for i, t in enumerate(unused)}
        self.node("loss", "aten.mean.default", (Ref(last.name),), ())
        self.graph = Graph(
            "Random",
            self.inputs,
            (("x",),),
            tuple(self.states),
            assign_keys(tuple(self.nodes)),
            {"loss": "loss", **outputs},
            loss="loss",
        )

    def node(self, name: str, op: str, args: tuple[object, ...], shape: tuple[int, ...]) -> None:
        values = {value.name: value for value in [*self.tensors, *(state.value for state in self.states)]}
        grad = any(values[arg.name].requires_grad for arg in args if isinstance(arg, Ref))
        value = Value(name, shape, "float32", requires_grad=grad)
        self.nodes.append(Node(name, op, args, {}, (value,)))
        self.tensors.append(value)

    def add_node(self, name: str) -> None:
        a, b = self.random.choice(self.tensors[-2:]), self.random.choice(self.tensors)
        kind = self.random.choice(["linear", "linear", "add", "mul", "relu"]) if len(self.tensors) > 1 else "linear"
        shape = self.inputs[0].shape
        if kind == "linear":
            weight = Value(f"w_{name}", (self.size, self.size), "float32", "parameter", True)
            self.states.append(State(weight, f"{name}.weight"))
            self.node(name, "aten.linear.default", (Ref(a.name), Ref(weight.name)), shape)
        elif kind == "relu":
            self.node(name, "aten.relu.default", (Ref(a.name),), shape)
        else:
            self.node(name, f"aten.{kind}.Tensor", (Ref(a.name), Ref(b.name)), shape)


class BruteForce:
    """Tries every combination of strategies; conversions by a search over sets of placements at hand."""

    def __init__(self, graph: Graph, axes: Mapping[str, int], costs: UnitCosts) -> None:
        self.graph, self.mesh, self.values = graph, MeshShape.from_dict(axes), graph.values
        self.pricing = Pricing(costs, self.mesh)
        self.best = INFINITE
        self.live = self.live_names()
        self.cost_by_state: dict[object, float] = {}
        self.steps_by_place: dict[object, list[Step]] = {}
        self.cost_by_step: dict[object, tuple[float, float]] = {}
        self.last_use = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs}
        self.options = [self.strategies(node) for node in graph.nodes]

    def live_names(self) -> set[str]:
        required, live = {self.graph.loss and self.graph.outputs[self.graph.loss]}, set()
        for node in reversed(self.graph.nodes):
            if node.output.name in required and node.output.requires_grad:
                live.add(node.name)
                required |= {name for name in node.inputs if self.values[name].requires_grad}
        return live

    def strategies(self, node: Node) -> list[tuple[float, list[Placement], Placement]]:
        rule = rule_for(node, self.values)
        assert rule is not None
        offered = axis_choices(
            rule,
            input_grads=[self.values[name].requires_grad for name in node.inputs],
            output_grads=[node.output.requires_grad],
        )
        choices = [choice for choice in offered if choice.rows is None]  # rows are exchanged in whole steps alone
        alternatives = []
        for joint in itertools.product(choices, repeat=len(self.mesh.sizes)):
            inputs = [tuple(choice.inputs[i] for choice in joint) for i in range(len(node.inputs))]
            output = tuple(choice.outputs[0] for choice in joint)
            tensors = [*(self.values[name] for name in node.inputs), node.output]
            if all(divides(p, t.shape, self.mesh) for p, t in zip([*inputs, output], tensors)):
                alternatives.append((self.compute(node, joint, inputs), inputs, output))
        return sorted(alternatives, key=lambda option: option[0])

    def compute(self, node: Node, joint: tuple[AxisChoice, ...], inputs: list[Placement]) -> float:
        cut = math.prod(size for choice, size in zip(joint, self.mesh.sizes) if choice.factor is not None)
        flops = forward_flops(node, self.values) / cut
        grads = len({name for name in node.inputs if self.values[name].requires_grad}) if node.name in self.live else 0
        return UnitCosts({}, second_per_flop=SECOND_PER_FLOP).compute_seconds(
            flops=flops * (1 + grads), num_bytes=0.0, dtype="float32"
        )

    def run(self) -> float:
        self.descend(0, 0.0, {}, {})
        return self.best

    def descend(self, index: int, cost: float, produced: dict[str, Placement], needs: dict[str, list]) -> None:
        """Choose for node ``index``; a value is paid for as soon as its last use has chosen."""
        if cost >= self.best:
            return
        if index == len(self.graph.nodes):
            loss = self.graph.outputs["loss"]
            self.best = min(
                self.best, cost + self.convert(loss, produced[loss], [(("I",) * len(self.mesh.names), True)])
            )
            return
        node = self.graph.nodes[index]
        for seconds, inputs, output in self.options[index]:
            now = {name: list(uses) for name, uses in needs.items()}
            for name, where in zip(node.inputs, inputs):
                live = node.name in self.live and self.values[name].requires_grad
                now.setdefault(name, []).append((where, live))
            total = cost + seconds
            for name in dict.fromkeys(node.inputs):
                if self.last_use[name] == index:
                    total += self.source_cost(name, produced, now[name])
            self.descend(index + 1, total, {**produced, node.output.name: output}, now)

    def source_cost(self, name: str, produced: Mapping[str, Placement], needs: list) -> float:
        value = self.values[name]
        if name in produced:
            return self.convert(name, produced[name], needs)
        if value.kind == "input":
            return self.convert(name, ("R",) * len(self.mesh.names), needs)
        types = ["I", *(f"S({dim})" for dim in range(len(value.shape)))]
        places = itertools.product(types, repeat=len(self.mesh.names))
        stored = [place for place in places if divides(place, value.shape, self.mesh)]
        return min(self.convert(name, placement, needs) for placement in stored)

    def convert(self, name: str, root: Placement, needs: list) -> float:
        key = (name, root, frozenset(needs))
        if key not in self.cost_by_state:
            self.cost_by_state[key] = self.cheapest(self.values[name], root, set(needs))
        return self.cost_by_state[key]

    def cheapest(self, value: Value, root: Placement, needs: set) -> float:
        """Uniform-cost search over the sets of (placement, gradient comes back) that are at hand."""
        types = ["R", "P", *(["I"] if value.requires_grad else []), *(f"S({d})" for d in range(len(value.shape)))]
        lives = {live for _, live in needs}  # if all uses are alike there is nothing to tell apart
        needs = needs if len(lives) > 1 else {(where, True) for where, _ in needs}
        pays = {True: True in lives, False: False}
        start = frozenset({(root, True)})
        queue: list = [(0.0, 0, start)]
        best = {start: 0.0}
        count = itertools.count(1)
        while queue:
            cost, _, have = heapq.heappop(queue)
            if cost > best[have]:
                continue
            if all((where, True) in have or (not live and (where, False) in have) for where, live in needs):
                return cost
            if len(have) > len(needs) + len(self.mesh.names) + 1:
                continue
            for (placement, back), live in itertools.product(have, (True, False) if len(lives) > 1 else (True,)):
                if live and not back:
                    continue
                for step in self.steps(placement, tuple(types), value):
                    then = have | {(step.target, live)}
                    total = cost + self.step_cost(step, value, pays[live])
                    if total < best.get(then, INFINITE):
                        best[then] = total
                        heapq.heappush(queue, (total, next(count), then))
        return INFINITE

    def steps(self, placement: Placement, types: tuple[str, ...], value: Value) -> list[Step]:
        """Every step of ``value`` out of ``placement``; each is asked for from many sets."""
        key = (placement, types, value.name)
        if key not in self.steps_by_place:
            every = steps_from(placement, self.mesh, [types] * len(placement))
            self.steps_by_place[key] = [step for step in every if divides(step.target, value.shape, self.mesh)]
        return self.steps_by_place[key]

    def step_cost(self, step: Step, value: Value, live: bool) -> float:
        key = (step, value.name)
        if key not in self.cost_by_step:
            self.cost_by_step[key] = self.pricing.step(step, value)
        forward, backward = self.cost_by_step[key]
        return forward + (backward if live else 0.0)


SECOND_PER_FLOP = 0.05


@pytest.mark.parametrize("seed", range(1, 16))
def test_objective_equals_enumeration_on_one_axis(seed: int) -> None:
    check(seed, num_nodes=random.Random(seed).randint(3, 8), axes={"x": 2 if seed % 2 else 4})


@pytest.mark.parametrize("seed", range(100, 101))
def test_objective_equals_enumeration_on_two_axes(seed: int) -> None:
    check(seed, num_nodes=2, axes={"x": 2, "y": 2})


def check(seed: int, *, num_nodes: int, axes: Mapping[str, int]) -> None:
    graph = Random(seed, num_nodes).graph
    costs = UnitCosts(dict(axes), second_per_flop=SECOND_PER_FLOP)
    plan = search(graph, mesh=MeshShape.from_dict(axes), cost_model=costs, cluster_info={})
    assert plan.certificate.status == "optimal"
    assert plan.certificate.objective == pytest.approx(BruteForce(graph, axes, costs).run(), rel=1e-6)
    again, collectives = price(graph, plan, costs)
    assert again.total == pytest.approx(plan.certificate.objective, rel=1e-9)
    assert collectives == plan.collectives
