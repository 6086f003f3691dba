"""Walk a graph node by node under a plan and charge every operator and every conversion, with nothing of the ILP.

Every copy of every block is walked as it stands in the graph, unfolded. A value's conversions are those of the plan's
tree that its uses in that very copy go through, each done once however many uses share it. Every operator and every
conversion is written down as a ``Charge``; the costs are their sum.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from passes.ir.conversions import is_legal, step_between
from passes.ir.graph import Graph, Node, Value
from passes.ir.types import I, Placement, R
from passes.plan import CollectivePlan, ConversionPlan, Costs, NodePlan, Plan
from passes.repeats.repeated_blocks import BlockRun, folded_runs
from passes.rules import forward_flops, rule_for
from passes.rules.rule import AxisChoice, gathers_rows, pieces_of_work
from planner.sharding_ilp.bundles import bundles_of
from planner.sharding_ilp.liveness import live_nodes, saved_values
from planner.sharding_ilp.options import FlopsOf, RuleFor, offered
from planner.sharding_ilp.plan_of_assignment import Tally, add_to_tally, collectives_of
from planner.sharding_ilp.sharding_prices import Collective, Prices, Pricing, is_view
from planner.sharding_ilp.shared_rows import shared_collectives

#: (source, target) of a step.
Edge = tuple[Placement, Placement]
#: (block, copy): a copy of a repeated block.
Copy = tuple[int, int]


@dataclass(frozen=True)
class Charge:
    """Seconds forward and backward of one operator, or of one conversion of a value (``step``, else None).

    Attributes:
        name: of the node or of the value, as they stand in the unfolded graph.
        copy: (block, copy) where the value is what a copy of a block takes from the one before, else None.
        kernels, collectives: how many of them the host launches for it, forward and backward.
    """

    name: str
    compute: tuple[float, float] = (0.0, 0.0)
    communication: tuple[float, float] = (0.0, 0.0)
    step: Edge | None = None
    copy: Copy | None = None
    kernels: tuple[int, int] = (0, 0)
    collectives: tuple[int, int] = (0, 0)

    def launches(self, phase: int) -> int:
        """What the host launches for it, forward (0) or backward (1)."""
        return self.kernels[phase] + self.collectives[phase]


@dataclass(frozen=True)
class GraphWalk:
    """The totals of a walk.

    Attributes:
        costs, collectives: of one step.
        charges: everything that ``costs`` counts in seconds.
        conversions: the plan's, as often as the walk did them.
        inputs, outputs: by node name, the placements that it takes and gives.
        runs: the repeated blocks that the plan folds, in its order.
    """

    costs: Costs
    collectives: tuple[CollectivePlan, ...]
    charges: tuple[Charge, ...]
    conversions: tuple[ConversionPlan, ...]
    inputs: dict[str, list[Placement]]
    outputs: dict[str, list[Placement]]
    runs: tuple[BlockRun, ...]


def price(
    graph: Graph, plan: Plan, cost_model: Prices, *, rules: RuleFor = rule_for, flops: FlopsOf = forward_flops
) -> tuple[Costs, tuple[CollectivePlan, ...]]:
    """Costs and collectives of one step of ``plan``, a plan on a given mesh, under any cost model.

    Raises:
        ValueError: as ``walk_graph``.
    """
    walk = walk_graph(graph, plan, Pricing(cost_model, plan.mesh, bundles_of(graph)), rules=rules, flops=flops)
    return walk.costs, walk.collectives


def walk_graph(
    graph: Graph, plan: Plan, pricing: Pricing, *, rules: RuleFor = rule_for, flops: FlopsOf = forward_flops
) -> GraphWalk:
    """Walk ``graph`` under ``plan`` with unit prices from ``pricing`` (of the plan's mesh).

    Raises:
        ValueError: if the plan does not hold together: an operator it does not know, a strategy it cannot have, a
            placement that no conversion reaches, or a conversion that nothing uses.
    """
    return _Walker(graph, plan, pricing, rules, flops).run()


@dataclass
class _ConversionTree:
    """The conversions of one value of one copy: the placement it is made in, the step into each other one, and those
    that are done (with whether a gradient comes back)."""

    value: Value
    root: Placement
    steps: dict[Placement, ConversionPlan]
    done: dict[Edge, bool]

    def reach(self, placement: Placement, *, live: bool) -> None:
        """Charge the steps to ``placement`` that have not been charged yet."""
        seen = set()
        while placement != self.root:
            step = self.steps.get(placement)
            if step is None or placement in seen:
                raise ValueError(f"no conversion of {self.value.name} from {self.root} reaches {placement}")
            seen.add(placement)
            edge = (step.source, step.target)
            self.done[edge] = self.done.get(edge, False) or live
            placement = step.source


class _Walker:
    def __init__(self, graph: Graph, plan: Plan, pricing: Pricing, rules: RuleFor, flops: FlopsOf) -> None:
        self.graph, self.plan, self.pricing, self.rules, self.flops = graph, plan, pricing, rules, flops
        self.values = graph.values
        self.nodes = {node.name: node for node in graph.nodes}
        self.live = live_nodes(graph)
        self.saved = saved_values(graph, self.live)
        self.runs = self._runs()
        self.copy_of = {
            name: (r, c) for r, run in enumerate(self.runs) for c, copy in enumerate(run.copies) for name in copy
        }
        self.keys = {node.name: node.key for node in graph.nodes}
        for run in self.runs:
            for copy in run.copies:
                self.keys.update((name, self.nodes[first].key) for name, first in zip(copy, run.copies[0]))
        self.gathering = dict(self._gathering())
        self.steps: dict[str, dict[Placement, ConversionPlan]] = defaultdict(dict)
        for conversion in plan.conversions:
            self.steps[conversion.value][conversion.target] = conversion
        self.trees: dict[object, _ConversionTree] = {}
        self.origins = dict(self._all_origins())
        self.charges: list[Charge] = []
        self.inputs: dict[str, list[Placement]] = {}
        self.outputs: dict[str, list[Placement]] = {}
        self.memory = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "converted"), 0)
        self.tally: Tally = {}

    def _runs(self) -> tuple[BlockRun, ...]:
        """The repeated blocks that the plan folds, in its order."""
        runs = folded_runs(self.graph, self.plan.blocks)
        if runs is None:
            raise ValueError(
                "the graph does not repeat the blocks of the plan: those that begin with "
                + ", ".join(repr(block.first_node) for block in self.plan.blocks)
            )
        return runs

    def run(self) -> GraphWalk:
        self._states()
        for node in self.graph.nodes:
            if not node.constant:
                self._node(node)
        self._hand_on()
        for path, name in self.graph.outputs.items():
            live = self.values[name].requires_grad and self.graph.loss in (None, path)
            placement = self.plan.outputs[path].placement
            if path == self.graph.loss or self.graph.loss is None:
                self._check_whole(path, self.values[name], placement)
            self._tree(name).reach(placement, live=live)
        conversions = self._conversions()
        return GraphWalk(
            self._costs(),
            collectives_of(self.tally),
            tuple(self.charges),
            conversions,
            self.inputs,
            self.outputs,
            self.runs,
        )

    def _costs(self) -> Costs:
        compute = [sum(charge.compute[phase] for charge in self.charges) for phase in (0, 1)]
        communication = [sum(charge.communication[phase] for charge in self.charges) for phase in (0, 1)]
        return Costs(compute[0], compute[1], communication[0], communication[1], self.memory)

    def _check_whole(self, path: str, value: Value, placement: Placement) -> None:
        if set(placement) != {I if value.requires_grad else R}:
            raise ValueError(f"output {path!r} is {placement}, not whole on every device")

    def _states(self) -> None:
        for state in self.graph.states:
            if state.value.kind in ("parameter", "buffer"):
                num_bytes = self.pricing.state_bytes(state.value, self.plan.states[state.path].placement)
                self.memory["parameters"] += num_bytes.parameters
                self.memory["gradients"] += num_bytes.gradients
                self.memory["optimizer"] += num_bytes.optimizer

    def _choices(self, node: Node, planned: NodePlan) -> tuple[AxisChoice, ...]:
        rule = self.rules(node, self.values)
        strategy = []
        for label, choices in zip(planned.strategy, offered(node, self.values, rule, self.plan.mesh)):
            by_label = {choice.label: choice for choice in choices}
            if label not in by_label:
                raise ValueError(f"{node.op} ({node.key!r}) has no strategy {label!r}")
            strategy.append(by_label[label])
        return tuple(strategy)

    def _node(self, node: Node) -> None:
        planned = self.plan.nodes.get(self.keys[node.name])
        if planned is None:
            raise ValueError(f"the plan says nothing of {node.op} ({node.key!r})")
        choices = self._choices(node, planned)
        inputs, outputs = _placements(node, choices)
        if list(planned.outputs) != outputs:
            raise ValueError(f"{node.op} ({node.key!r}) gives {outputs}, the plan says {planned.outputs}")
        live = node.name in self.live
        seconds = self._compute_seconds(node, choices)
        flops = self.flops(node, self.values)
        kernels = self.pricing.launches(node, self.values, inputs, outputs, flops=flops, live=live)
        own_collectives, num_own = [0.0, 0.0], [0, 0]
        for issued in self._own_collectives(node, choices, seconds, live=live):
            own_collectives[issued.phase != "forward"] += issued.seconds
            num_own[issued.phase != "forward"] += issued.seconds > 0
            add_to_tally(self.tally, (issued.collective, issued.axis, issued.phase), 1, issued.num_bytes)
        sent, times = (own_collectives[0], own_collectives[1]), (num_own[0], num_own[1])
        self.charges.append(Charge(node.name, seconds, sent, kernels=kernels, collectives=times))
        self.inputs[node.name], self.outputs[node.name] = inputs, outputs
        for name, placement in zip(node.inputs, inputs):
            tree = self._tree_seen_by(node, name)
            tree.reach(placement, live=live and self.values[name].requires_grad)
        if not is_view(node):
            for value, placement in zip(node.outputs, outputs):
                if value.name in self.saved:
                    self.memory["activations"] += self.pricing.local_bytes(value, placement)

    def _compute_seconds(self, node: Node, choices: tuple[AxisChoice, ...]) -> tuple[float, float]:
        inputs, outputs = _placements(node, choices)
        cut = pieces_of_work(self.rules(node, self.values), choices, self.plan.mesh.sizes)
        flops, live = self.flops(node, self.values), node.name in self.live
        return self.pricing.compute(node, self.values, inputs, outputs, flops=flops, cut=cut, live=live)

    def _own_collectives(
        self, node: Node, choices: tuple[AxisChoice, ...], seconds: tuple[float, float], *, live: bool
    ) -> tuple[Collective, ...]:
        """What an operator issues itself; of linear layers that gather the rows of their input once, the first does."""
        together = self.gathering.get(node.name)
        if together is None:
            return self.pricing.reductions(self.rules(node, self.values), choices, beside=seconds, live=live)
        if node is not together[0]:
            return ()
        choices_of = [self._choices(each, self.plan.nodes[self.keys[each.name]]) for each in together]
        for each, others in zip(together, choices_of):
            if each.inputs[0] != node.inputs[0] or not gathers_rows(others):
                raise ValueError(f"{each.key!r} cannot share a gather with {node.key!r}, as the plan says")
        sent = [
            self.pricing.sent(self.rules(each, self.values), own, live=each.name in self.live)
            for each, own in zip(together, choices_of)
        ]
        compute = [self._compute_seconds(each, own) for each, own in zip(together, choices_of)]
        return shared_collectives(sent, compute, slowdown=self.pricing.overlap_slowdown)

    def _gathering(self) -> Iterator[tuple[str, tuple[Node, ...]]]:
        """Node name → the linear layers that share its gather in its copy of a block."""
        by_key: dict[tuple[str, Copy | None], Node] = {
            (self.keys[node.name], self.copy_of.get(node.name)): node for node in self.graph.nodes
        }
        for group in self.plan.shared_gathers:
            for copy in {copy for key, copy in by_key if key == group[0]}:
                together = tuple(by_key[key, copy] for key in group if (key, copy) in by_key)
                if len(together) < len(group):
                    raise ValueError(f"operators that share a gather are not in one block: {', '.join(group)}")
                yield from ((node.name, together) for node in together)

    def _tree_seen_by(self, node: Node, name: str) -> _ConversionTree:
        """The tree of an input: in a block, what comes from the copy before is already in its carried placement."""
        place = self.copy_of.get(node.name)
        if place is not None:
            run, copy = place
            for slot, names in enumerate(self.runs[run].carried):
                if names[copy] == name:
                    root = self.plan.blocks[run].carried[slot]
                    key = f"carry:{run}#{slot}"
                    return self._tree_of((key, copy), key, self.values[name], root)
        return self._tree(name)

    def _tree(self, name: str) -> _ConversionTree:
        """The tree of a value rooted where it is computed."""
        if name in self.trees:
            return self.trees[name]
        key, root = self.origins[name]
        return self._tree_of(name, key, self.values[name], root)

    def _tree_of(self, tree: object, key: str, value: Value, root: Placement) -> _ConversionTree:
        if tree not in self.trees:
            self.trees[tree] = _ConversionTree(value, root, self.steps.get(key, {}), {})
        return self.trees[tree]

    def _all_origins(self) -> Iterator[tuple[str, tuple[str, Placement]]]:
        """Value name → the plan's key of the value, and the placement it is made in."""
        whole = (R,) * len(self.plan.mesh.names)
        for path, value in zip(self.graph.input_paths, self.graph.inputs):
            key = ".".join(map(str, path))
            yield value.name, (f"input:{key}", self.plan.inputs[key].placement)
        paths = {state.value.name: state.path for state in self.graph.states}
        first = {name: names[0] for run in self.runs for names in run.states for name in names}
        for state in self.graph.states:
            name = state.value.name
            yield name, (f"state:{paths[first.get(name, name)]}", self.plan.states[state.path].placement)
        for node in self.graph.nodes:
            planned = self.plan.nodes.get(self.keys[node.name])
            for index, value in enumerate(node.outputs):
                root = whole if node.constant or planned is None else planned.outputs[index]
                yield value.name, (f"node:{self.keys[node.name]}#{index}", root)

    def _hand_on(self) -> None:
        """Convert the values that each copy takes from outside (or from the copy before) to their carried placement."""
        for index, run in enumerate(self.runs):
            for slot, names in enumerate(run.carried):
                live = self._carry_is_live(run, names)
                for name in names:
                    self._tree(name).reach(self.plan.blocks[index].carried[slot], live=live)

    def _carry_is_live(self, run: BlockRun, names: tuple[str, ...]) -> bool:
        if not self.values[names[0]].requires_grad:
            return False
        return any(n in self.live and names[0] in self.nodes[n].inputs for n in run.copies[0])

    def _conversions(self) -> tuple[ConversionPlan, ...]:
        """Charge every conversion that was reached; the plan's conversions as they were counted."""
        copies: Counter[tuple[str, Placement]] = Counter()
        counted: dict[tuple[str, Placement], ConversionPlan] = {}
        for tree, key, copy in self._trees_with_keys():
            for (source, target), live in tree.done.items():
                copies[key, target] += 1
                conversion = self._step(tree, key, source, target, live, copy)
                if (key, target) not in counted or conversion.backward is not None:
                    counted[key, target] = conversion
        idle = {(c.value, c.target) for c in self.plan.conversions} - copies.keys()
        if idle:
            raise ValueError(f"the plan has conversions that nothing uses: {sorted(idle)[:3]}")
        return tuple(dataclasses.replace(each, copies=copies[key]) for key, each in counted.items())

    def _trees_with_keys(self) -> Iterator[tuple[_ConversionTree, str, Copy | None]]:
        for name, tree in self.trees.items():
            if isinstance(name, tuple):
                key, copy = name
                yield tree, key, (int(key.removeprefix("carry:").partition("#")[0]), copy)
            else:
                yield tree, self.origins[str(name)][0], None

    def _step(
        self, tree: _ConversionTree, key: str, source: Placement, target: Placement, live: bool, copy: Copy | None
    ) -> ConversionPlan:
        """Charge one conversion of one copy of a value; return its entry in the plan."""
        step, value = step_between(source, target), tree.value
        if not is_legal(step, value.shape, self.plan.mesh):
            raise ValueError(f"{value.name} cannot be converted from {source} to {target} in one step")
        seconds = self.pricing.step(step, value)
        num_bytes = self.pricing.step_bytes(step, value)
        live = live and value.requires_grad
        forward, backward = step.collectives
        axis = step.axis_name(self.plan.mesh)
        communication = (seconds[0], seconds[1] if live else 0.0)
        times = int(communication[0] > 0), int(communication[1] > 0)
        self.charges.append(
            Charge(value.name, communication=communication, step=(source, target), copy=copy, collectives=times)
        )
        if forward:
            add_to_tally(self.tally, (forward, axis, "forward"), 1, num_bytes)
        if backward and live:
            add_to_tally(self.tally, (backward, axis, "backward"), 1, num_bytes)
        self.memory["converted"] += self.pricing.step_memory(step, value, saved=value.name in self.saved)
        return ConversionPlan(key, axis, source, target, 1, forward, backward if live else None, num_bytes)


def _placements(node: Node, choices: tuple[AxisChoice, ...]) -> tuple[list[Placement], list[Placement]]:
    """What an operator takes and gives."""
    inputs = [tuple(choice.inputs[place] for choice in choices) for place in range(len(node.inputs))]
    outputs = [tuple(choice.outputs[place] for choice in choices) for place in range(len(node.outputs))]
    return inputs, outputs
