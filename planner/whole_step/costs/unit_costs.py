"""Costs of one unit under one sharding: seconds and bytes of one copy for one micro-batch on one device.

All figures come from a ``Variant``: each operator's chosen option, each value's conversions, and what autograd saves of
both. The n copies of a unit share the cost of its conversions evenly, so that n times its figures is the cost of the
folded program.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field

from cost_models.dtypes import item_size
from passes.autograd.peak import Lifetimes
from passes.autograd.recompute_policies import Activations, Recompute, kept_under
from passes.autograd.saved import Extra
from passes.ir.graph import Node, Value
from passes.ir.types import Placement, local_shape, shard_dim
from passes.losses import ChunkedUnits, Placed, strategies
from passes.plan.step_plan import CHUNKED_LOSS, ON_HOST
from passes.repeats.model_units import ModelUnit, find_units, unit_of_nodes
from passes.rules.expert_rules import is_experts
from passes.rules.linear_rows import LINEAR
from planner.sharding_ilp.liveness import live_nodes
from planner.sharding_ilp.sharding_problem import ValueStream
from planner.whole_step.costs.chunked_units import chunked_units
from planner.whole_step.costs.crossing_forms import CrossingBytes
from planner.whole_step.costs.launch_counts import LaunchCounts
from planner.whole_step.costs.row_exchange import workspace
from planner.whole_step.costs.sharding import ShardingSpace, Variant
from planner.whole_step.costs.step_prices import EXPERT, weight_share
from planner.whole_step.costs.unit_conversions import UnitConversions
from planner.whole_step.costs.unit_figures import (
    BytesBeside,
    ConvertedCopy,
    Policy,
    UnitFigures,
    UnitVariant,
    Weight,
    on_host,
)

#: The policy of ``passes.autograd.recompute_policies`` on which each policy of the planner's own rests.
_BASES = {"regather": "none", CHUNKED_LOSS: "none", ON_HOST: "none"}
#: Policies that keep the results of collectives for the backward pass.
_KEEPS_COPIES = ("none", CHUNKED_LOSS, ON_HOST)


@dataclass(frozen=True)
class StepUnits:
    """What autograd saves of every unit under every policy, whatever the sharding: computed once per graph.

    ``activations`` are the graph's saved activations; ``offload`` says whether units may keep theirs on the host.
    ``chunked`` are the units whose loss may be computed in chunks, ``chunked_activations`` the saved activations if it
    is.
    """

    units: tuple[ModelUnit, ...]
    activations: Activations
    recompute: Mapping[tuple[int, str], Recompute]
    compiled: bool = False
    offload: bool = False
    chunked: ChunkedUnits | None = None
    chunked_activations: Activations | None = None
    _lifetimes: dict[tuple[object, ...], Lifetimes] = field(default_factory=dict, compare=False, repr=False)

    def lifetimes(self, activations: Activations, nodes: tuple[str, ...], policy: str) -> Lifetimes:
        """When the storages of a unit's ``nodes`` are made and freed, computed once; ``activations``: one of ours."""
        key = (activations is self.chunked_activations, nodes, policy)
        if key not in self._lifetimes:
            self._lifetimes[key] = Lifetimes(activations, nodes, policy, compiled=self.compiled)
        return self._lifetimes[key]

    @property
    def logits(self) -> frozenset[str]:
        """Values that a chunked loss never materialises."""
        pairs = (
            [pair for of_unit in self.chunked.pairs.values() for pair in of_unit] if self.chunked is not None else []
        )
        return frozenset(node.output.name for pair in pairs for node in (pair.linear, *pair.between))

    @staticmethod
    def of(space: ShardingSpace, *, compiled: bool = False, offload: bool = False) -> StepUnits:
        graph, live = space.graph, live_nodes(space.graph)
        units = find_units(graph, space.runs)
        activations = Activations.of(graph, live, [name for unit in units for name in unit.nodes])
        recompute = {
            (index, policy): kept_under(activations, unit.nodes, policy, compiled=compiled)
            for index, unit in enumerate(units)
            for policy in ("none", "selective", "full")
        }
        chunked = chunked_units(graph, space.runs, units)
        if not chunked.pairs:
            return StepUnits(units, activations, recompute, compiled, offload)
        inside = [name for nodes in chunked.nodes.values() for name in nodes]
        chunked_activations = Activations.of(chunked.graph, live_nodes(chunked.graph), inside)
        for index, nodes in chunked.nodes.items():
            recompute[index, CHUNKED_LOSS] = kept_under(chunked_activations, nodes, "none", compiled=compiled)
        return StepUnits(units, activations, recompute, compiled, offload, chunked, chunked_activations)


def unit_figures(space: ShardingSpace, step_units: StepUnits, variant: Variant) -> tuple[UnitFigures, ...]:
    """The figures of every unit under ``variant``."""
    reader = _FigureReader(space, step_units, variant)
    return tuple(reader.figures(index) for index in range(len(step_units.units)))


class _FigureReader:
    def __init__(self, space: ShardingSpace, step_units: StepUnits, variant: Variant) -> None:
        self.space, self.step_units, self.variant = space, step_units, variant
        self.units, self.activations = step_units.units, step_units.activations
        self.problem, self.pricing = variant.problem, variant.pricing
        self.options = variant.assignment.options
        chunked = step_units.chunked.graph.values if step_units.chunked is not None else {}
        self.values: Mapping[str, Value] = ChainMap(space.graph.values, chunked)  # type: ignore[arg-type]
        self.unit_of = unit_of_nodes(step_units.units)
        self.conversions = UnitConversions(variant, self.units, self.unit_of)
        self.places: dict[str, Placement] = {}
        self.weights_of = self._weights()
        self.counts = LaunchCounts(space, variant)
        self.crossing = CrossingBytes(variant, self.units, self.unit_of)

    def figures(self, index: int) -> UnitFigures:
        unit = self.units[index]
        compute, communication = [0.0, 0.0], [0.0, 0.0]
        weight_backward = 0.0
        for name in unit.nodes:
            option = self.options.get(name)
            if option is None:
                continue
            for phase in (0, 1):
                compute[phase] += option.compute[phase]
                communication[phase] += option.communication[phase]
            weight_backward += option.compute[1] * self._weight_share(self.problem.elements[name].node)
        conversions = self.conversions.of(index)
        for item in conversions:
            communication[0] += item.copies * item.arc.forward / unit.count
            communication[1] += item.backward_copies * item.arc.backward / unit.count
        entering, returning = self.crossing.before(index, self.values)
        return UnitFigures(
            unit=unit,
            compute=(compute[0], compute[1]),
            communication=(communication[0], communication[1]),
            weight_backward=weight_backward,
            policies=tuple(self._policies(index)),
            weights=tuple(self.weights_of[index][0]),
            buffer_bytes=self.weights_of[index][1],
            entering_bytes=entering,
            returning_bytes=returning,
            launches=self.counts.operators(unit.nodes),
            collective_launches=self.counts.collectives(unit, conversions),
        )

    def _weight_share(self, node: Node | None) -> float:
        """Share of an operator's backward that only makes gradients of parameters."""
        return 0.0 if node is None else weight_share(node, self.values, self.space.states)

    def _weights(self) -> dict[int, tuple[list[Weight], float]]:
        by_unit: dict[int, tuple[list[Weight], float]] = {index: ([], 0.0) for index in range(len(self.units))}
        paths = {state.value.name: state.path for state in self.space.graph.states}
        for name, element in self.problem.elements.items():
            if element.kind not in ("parameter", "buffer"):
                continue
            stream = self.problem.streams[name]
            users = tuple(sorted({unit for unit in self._users(stream) if unit is not None}))
            if not users:
                continue
            value, where = stream.value, self.options[name].outputs[0]
            owner = users[0]
            weights, buffers = by_unit[owner]
            if element.kind == "buffer":
                by_unit[owner] = (weights, buffers + self.pricing.local_bytes(value, where))
                continue
            shared = element.copies == 1 and self.units[owner].count > 1
            weights.append(
                Weight(
                    paths[name],
                    self.pricing.local_elements(value, where),
                    value.dtype,
                    value.requires_grad,
                    users,
                    shared,
                    self._feeds_experts(stream) and not self._is_whole(value, where),
                )
            )
        return by_unit

    def _is_whole(self, value: Value, where: Placement) -> bool:
        """Whether a parameter of a region of experts is whole on their axis: one of a module of its own."""
        names = self.variant.cut.mesh.names
        return (
            value.name in self.space.regions.parameters
            and EXPERT in names
            and shard_dim(where[names.index(EXPERT)]) is None
        )

    def _feeds_experts(self, stream: ValueStream) -> bool:
        """Whether a state is a mixture's experts, directly or through views and casts."""
        if stream.value.name in self.space.regions.parameters:
            return True
        if not self.space.expert_nodes:
            return False
        for use in stream.uses:
            element = self.problem.elements.get(use.element)
            node = element.node if element is not None else None
            if node is not None and is_experts(node):
                return True
            if node is not None and any(
                self._feeds_experts(self.problem.streams[value.name])
                for value in node.outputs
                if value.name in self.space.states and value.name in self.problem.streams
            ):
                return True
        return False

    def _users(self, stream: ValueStream) -> set[int]:
        """Units that use a state, directly or through views and casts."""
        users: set[int] = set()
        for use in stream.uses:
            if use.element not in self.unit_of:
                continue
            node = self.problem.elements[use.element].node
            outputs = [value.name for value in node.outputs] if node is not None else []
            derived = [name for name in outputs if name in self.space.states and name in self.problem.streams]
            if derived:
                for name in derived:
                    users |= self._users(self.problem.streams[name])
            else:
                users.add(self.unit_of[use.element])
        return users

    def _made(self, name: str) -> Placement:
        """The placement in which a value is produced (of a value carried from copy to copy: handed on)."""
        if name not in self.places:
            self.places[name] = self._find_made(name)
        return self.places[name]

    def _find_made(self, name: str) -> Placement:
        for index, run in enumerate(self.problem.runs):
            for slot, names in enumerate(run.carried):
                if name == names[0] or name == names[-1]:
                    return self.options[f"carry:{index}#{slot}"].outputs[0]
        stream = self.problem.streams.get(self.problem.first_name(name))
        if stream is None:
            return ("R",) * len(self.variant.cut.mesh.names)
        return self.options[stream.source].outputs[stream.output]

    def _local_bytes(self, value: Value) -> float:
        return float(self.pricing.local_bytes(value, self._made(value.name)))

    def _extra_bytes(self, extra: Extra) -> float:
        like = self.values[extra.like]
        whole, local = like.num_elements, self.pricing.local_elements(like, self._made(extra.like))
        return extra.num_bytes * local / max(1, whole)

    # -- policies -----------------------------------------------------------------------------------------------

    def _policies(self, index: int) -> list[Policy]:
        way = self._as_captured(index)
        beside = self._bytes_beside(index, way)
        policies = [self._policy(index, "none", way, beside)]
        if beside.copies:
            policies.append(self._policy(index, "regather", way, beside))
        policies.append(self._policy(index, "selective", way, beside))
        policies.append(self._policy(index, "full", way, beside))
        if self.step_units.offload and self.units[index].count > 1:
            policies.append(self._policy(index, ON_HOST, way, beside))
        chunked = self._with_chunked_loss(index)
        if chunked is not None:
            policies.append(self._policy(index, CHUNKED_LOSS, chunked, self._bytes_beside(index, chunked)))
        return policies

    def _bytes_beside(self, index: int, way: UnitVariant) -> BytesBeside:
        copies = self._converted_copies(index, way)
        return BytesBeside(copies, self._visiting_bytes(way), self._exchanged_bytes(way))

    def _as_captured(self, index: int) -> UnitVariant:
        unit = self.units[index]
        placed = {
            name: Placed(self.options[name].inputs, self.options[name].outputs)
            for name in unit.nodes
            if name in self.options and self.problem.elements[name].node is not None
        }
        return UnitVariant(self.activations, unit.nodes, placed)

    def _with_chunked_loss(self, index: int) -> UnitVariant | None:
        """The unit with its loss in chunks; None if it has none, or the sharding converts its logits."""
        chunked, activations = self.step_units.chunked, self.step_units.chunked_activations
        if chunked is None or activations is None or index not in chunked.pairs:
            return None
        placed = dict(self._as_captured(index).placed)
        placements: dict[str, Placement] = {}
        for pair in chunked.pairs[index]:
            chosen = strategies(pair, chunked.graph.values, placed)
            if chosen is None:
                return None
            for node in pair.replacement:
                placed[node.name] = chosen[node.name].placed
            placements |= {node.output.name: placed[node.name].outputs[0] for node in pair.moved}
        return UnitVariant(activations, chunked.nodes[index], placed, placements)

    def _policy(
        self,
        index: int,
        name: str,
        way: UnitVariant,
        beside: BytesBeside,
    ) -> Policy:
        copies, visiting, exchanged = beside
        keep_copies = name in _KEEPS_COPIES
        base = _BASES.get(name, name)
        unit = self.units[index]
        rule = self.step_units.recompute[index, name if name == CHUNKED_LOSS else base]
        self.places.update(way.new_placements)
        roots = {root for root in rule.values if self._is_held(unit, root)}
        if keep_copies:
            replaced = {way.activations.roots.get(value, value) for value, _ in copies}
            roots -= replaced - self._taken_as_made(way)
        saved = sum(self._local_bytes(self.values[root]) for root in roots)
        saved += sum(self._extra_bytes(extra) for extra in rule.extras)
        if keep_copies:
            saved += sum(copy.num_bytes for copy in copies.values())
        saved += visiting if base != "full" else 0.0
        options = [self.options[node] for node in rule.recomputed if node in self.options]
        compute = sum((option.compute[0] for option in options), 0.0)
        launches, _ = self.counts.operators(rule.recomputed)
        if name == CHUNKED_LOSS:
            logits = self._logits(index)
            compute += sum(self.options[linear].compute[0] for linear in logits)
            launches += self.counts.operators(logits)[0]
        again = 0.0 if keep_copies else sum((copy.seconds for copy in copies.values()), 0.0)
        collectives = 0.0 if keep_copies else float(sum(copy.launches for copy in copies.values()))
        if base == "full":
            conversions = self.conversions.again(index, rule.recomputed)
            again = sum(option.communication[0] for option in options)
            again += sum(item.copies * item.arc.forward / unit.count for item in conversions)
            collectives, _ = self.counts.collectives(unit, conversions, names=rule.recomputed)
        lifetimes = self.step_units.lifetimes(way.activations, way.nodes, base)
        peak = lifetimes.peak(local_bytes=self._local_bytes, extra_bytes=self._extra_bytes)
        peak += exchanged
        policy = Policy(name, compute, again, saved, peak + visiting, launches=launches + collectives)
        if name != ON_HOST:
            return policy
        return on_host(
            policy, staying=sum(self._local_bytes(self.values[root]) for root in roots if root in unit.carried)
        )

    def _visiting_bytes(self, way: UnitVariant) -> float:
        """Bytes of rows that visit experts of this rank, and of their outputs, which come back: routed evenly."""
        if self.variant.cut.expert == 1:
            return 0.0
        total = 0.0
        for name in way.nodes:
            node = way.activations.nodes[name]
            if not is_experts(node) or name not in way.placed:
                continue
            placed = way.placed[name]
            k = self.values[node.inputs[1]].shape[-1]
            total += 2.0 * k * self.pricing.local_bytes(node.output, placed.outputs[0])
        return total

    def _exchanged_bytes(self, way: UnitVariant) -> float:
        """What the product that holds the most of its rows' exchange holds."""
        return max((self._exchange_of(way, name) for name in way.nodes if name in way.placed), default=0.0)

    def _exchange_of(self, way: UnitVariant, name: str) -> float:
        node, placed = way.activations.nodes[name], way.placed[name]
        if node.op != LINEAR:
            return 0.0
        mesh, source = self.variant.cut.mesh, self.values[node.inputs[0]]
        before = local_shape(source.shape, placed.inputs[0], mesh)
        behind = local_shape(node.output.shape, placed.outputs[0], mesh)
        return workspace(before, behind) * item_size(node.output.dtype)

    def _logits(self, index: int) -> list[str]:
        """The matrix products that losses in chunks do once more; that logits are not widened is not counted for them,
        so that no policy takes less time than ``none``."""
        assert self.step_units.chunked is not None
        return [pair.linear.name for pair in self.step_units.chunked.pairs[index]]

    def _is_held(self, unit: ModelUnit, root: str) -> bool:
        """Whether a value's memory counts for the unit: the unit produces it, or takes it from the unit before."""
        if root in unit.carried:
            return True
        made_here = self.problem.streams.get(root)
        return root in self.activations.computed and made_here is not None and made_here.source in set(unit.nodes)

    def _taken_as_made(self, way: UnitVariant) -> set[str]:
        """Storage roots that some operator of the unit saves in the placement in which they are produced."""
        roots = set()
        for name in way.nodes:
            if name not in way.placed or name not in way.activations.saved_by_node:
                continue
            node, input_placements = way.activations.nodes[name], way.placed[name].inputs
            for value in way.activations.saved_by_node[name].values:
                if value not in node.inputs or input_placements[node.inputs.index(value)] == self._made(value):
                    roots.add(way.activations.roots.get(value, value))
        return roots

    def _converted_copies(self, index: int, way: UnitVariant) -> dict[tuple[str, Placement], ConvertedCopy]:
        """Converted copies that the backward pass needs, by value and placement."""
        unit = self.units[index]
        copies: dict[tuple[str, Placement], ConvertedCopy] = {}
        for name in way.nodes:
            saved = way.activations.saved_by_node.get(name)
            if name not in way.placed or saved is None:
                continue
            node = way.activations.nodes[name]
            for value in saved.values:
                if value not in node.inputs or value in way.new_placements:
                    continue
                placement = way.placed[name].inputs[node.inputs.index(value)]
                again = self._forward_again(unit, value, placement)
                if again is not None:
                    num_bytes = float(self.pricing.local_bytes(self.values[value], placement))
                    copies[value, placement] = ConvertedCopy(num_bytes, *again)
        return copies

    def _forward_again(self, unit: ModelUnit, value: str, target: Placement) -> tuple[float, int] | None:
        """Seconds and number of the collectives on the way to ``target``; None if there are none: it is the value."""
        stream = self._stream(unit, value)
        if stream is None:
            return None
        steps = {item.arc.step.target: item for item in self.variant.assignment.trees[stream]}
        seconds, launches, moved, position = 0.0, 0, False, target
        while position in steps:
            item = steps[position]
            moved = moved or item.arc.step.collectives[0] is not None
            seconds, launches = seconds + item.arc.forward, launches + bool(item.arc.forward)
            position = item.arc.step.source
        return (seconds, launches) if moved else None

    def _stream(self, unit: ModelUnit, value: str) -> str | None:
        if unit.run is not None:
            for slot, names in enumerate(self.problem.runs[unit.run].carried):
                if names[0] == value:
                    return f"carry:{unit.run}#{slot}"
        name = self.problem.first_name(value)
        return name if name in self.problem.streams else None
