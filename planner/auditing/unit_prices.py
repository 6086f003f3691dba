"""Price every unit of a saved plan of a step from a walk of the unfolded graph, with nothing of the search.

Operators are charged to the copy of the unit that they stand in. A conversion is charged to the copy that makes the
value; of a value that a copy takes from the one before, to the taker; of what comes from outside (inputs, parameters,
constants), to the first that uses it. Copies of a repeated block differ in their conversions (the last one hands on
to something else, the first one takes from something else), and a chunk may begin at any of them: a copy's figures are
the mean over all copies, so that all copies together cost exactly what the walk counted.

Shared with the search are only the unit prices (``planner.whole_step.costs.step_prices``), what a unit is
(``passes.repeats.model_units``), and what autograd keeps of operators (``passes.autograd``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cost_models.dtypes import item_size
from passes.autograd.peak import working_peak
from passes.autograd.recompute_policies import Activations, kept_under
from passes.autograd.saved import Extra
from passes.ir.conversions import step_between
from passes.ir.graph import Graph, Value
from passes.ir.types import Placement, local_shape, shard_dim
from passes.losses import Placed, strategies
from passes.plan import Plan
from passes.plan.step_plan import CHUNKED_LOSS, ON_HOST
from passes.repeats.model_units import ModelUnit, find_units
from passes.repeats.repeated_blocks import BlockRun
from passes.rules.expert_rules import is_experts
from passes.rules.linear_rows import LINEAR
from planner.auditing.graph_walk import Charge, GraphWalk
from planner.sharding_ilp.liveness import live_nodes
from planner.whole_step.costs.chunked_units import chunked_units
from planner.whole_step.costs.crossing_forms import FormUse, ValueForms, in_program, sources_of
from planner.whole_step.costs.row_exchange import workspace
from planner.whole_step.costs.step_prices import EXPERT, StepPricing, weight_share

#: Forward and backward.
PHASES = (0, 1)


@dataclass(frozen=True)
class StateOfUnit:
    """A parameter or buffer that a unit answers for: its elements on one device, how many copies of the unit have it in
    common (1: it is each copy's own), whether other units use it too (``tied``), whether it is a mixture's experts."""

    value: Value
    elements: int
    copies: int
    tied: bool
    expert: bool = False


@dataclass(frozen=True)
class PricedPolicy:
    """One recompute policy: seconds and launches added to backward, saved bytes, and the peak beyond them."""

    seconds: float
    launches: float
    saved_bytes: float
    peak_bytes: float
    host_bytes: float = 0.0


@dataclass(frozen=True)
class _UnitOperators:
    """Operators of a unit as they run: what autograd keeps of them, by name the placements that they take, and by value
    the placement that it is made in."""

    activations: Activations
    nodes: tuple[str, ...]
    inputs: Mapping[str, list[Placement]]
    placements: Mapping[str, Placement]


class UnitPrices:
    """Figures of the units of a plan: one copy, one micro-batch, one device."""

    def __init__(self, graph: Graph, plan: Plan, pricing: StepPricing, walked: GraphWalk, *, compiled: bool) -> None:
        self.graph, self.plan, self.pricing, self.walked, self.compiled = graph, plan, pricing, walked, compiled
        self.values = graph.values
        self.nodes = {node.name: node for node in graph.nodes}
        self.runs: tuple[BlockRun, ...] = walked.runs
        self.units = find_units(graph, self.runs)
        self.place = dict(self._places())
        self.maker = {value.name: node.name for node in graph.nodes for value in node.outputs}
        self.users = self._users()
        self.placements = dict(self._placements())
        self.operators = {charge.name: charge for charge in walked.charges if charge.step is None}
        self.conversions: dict[int, list[Charge]] = defaultdict(list)
        self.forward_step: dict[tuple[str, tuple[int, int] | None, Placement], tuple[Placement, float]] = {}
        for charge in walked.charges:
            self._convert(charge)
        inside = [name for unit in self.units for name in unit.nodes]
        self.activations = Activations.of(graph, live_nodes(graph), inside)

    # -- who pays -----------------------------------------------------------------------------------------------

    def _places(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Node name → (unit, copy)."""
        for index, unit in enumerate(self.units):
            copies = [unit.nodes] if unit.run is None else self.runs[unit.run].copies
            for copy, names in enumerate(copies):
                yield from ((name, (index, copy)) for name in names)

    def _users(self) -> dict[str, list[str]]:
        users: dict[str, list[str]] = defaultdict(list)
        for node in self.graph.nodes:
            for name in dict.fromkeys(node.inputs):
                users[name].append(node.name)
        return users

    def _convert(self, charge: Charge) -> None:
        if charge.step is None:
            return
        source, target = charge.step
        self.forward_step[charge.name, charge.copy, target] = (source, charge.communication[0])
        unit = self.payer(charge)
        if unit is not None:
            self.conversions[unit].append(charge)

    def payer(self, charge: Charge) -> int | None:
        """The unit that a conversion is charged to; None if no unit uses the value."""
        if charge.copy is not None:
            return next(index for index, unit in enumerate(self.units) if unit.run == charge.copy[0])
        maker = self.maker.get(charge.name)
        if maker in self.place:
            return self.place[maker][0]
        users = [self.place[name][0] for name in self.users[charge.name] if name in self.place]
        return min(users, default=None)

    # -- seconds ------------------------------------------------------------------------------------------------

    def seconds(self, index: int) -> tuple[float, float]:
        """Forward and backward of one copy, without recomputation."""
        unit = self.units[index]
        names = [name for name, (owner, _) in self.place.items() if owner == index and name in self.operators]
        forward, backward = (
            sum(self.operators[name].compute[phase] + self.operators[name].communication[phase] for name in names)
            + sum(charge.communication[phase] for charge in self.conversions[index])
            for phase in PHASES
        )
        return forward / unit.count, backward / unit.count

    def launches(self, index: int) -> tuple[float, float]:
        """What the host launches for one copy, forward and backward, without recomputation."""
        names = [name for name, (owner, _) in self.place.items() if owner == index and name in self.operators]
        charges = [*(self.operators[name] for name in names), *self.conversions[index]]
        forward, backward = (sum(charge.launches(phase) for charge in charges) for phase in PHASES)
        return forward / self.units[index].count, backward / self.units[index].count

    def weight_seconds(self, index: int) -> float:
        """The part of one copy's backward that makes gradients of parameters and nothing else."""
        total = 0.0
        for name in self.units[index].nodes:
            if name in self.operators:
                share = weight_share(self.nodes[name], self.values, self.pricing.states)
                total += self.operators[name].compute[1] * share
        return total

    # -- what is kept -------------------------------------------------------------------------------------------

    def policy(self, index: int, name: str) -> PricedPolicy:
        """Seconds and bytes of one copy under recompute policy ``name``.

        Raises:
            ValueError: if the unit cannot run so.
        """
        if name == CHUNKED_LOSS:
            return self._chunked_loss(index)
        unit = self.units[index]
        run = _UnitOperators(self.activations, unit.nodes, self.walked.inputs, self.placements)
        return self._policy(index, name, run)

    def _chunked_loss(self, index: int) -> PricedPolicy:
        """The unit with its logits computed chunk by chunk, twice."""
        chunked = chunked_units(self.graph, self.runs, self.units)
        inputs, placements = dict(self.walked.inputs), dict(self.placements)
        for pair in chunked.pairs.get(index, ()):
            placed = {
                node.name: Placed(tuple(inputs[node.name]), tuple(self.walked.outputs[node.name]))
                for node in pair.replaced
            }
            choices = strategies(pair, chunked.graph.values, placed)
            if choices is None:
                raise ValueError(
                    f"the plan computes a loss in chunks of which it converts the logits: {pair.loss.key!r}"
                )
            for node in pair.replacement:
                inputs[node.name] = list(choices[node.name].placed.inputs)
                placements[node.output.name] = choices[node.name].placed.outputs[0]
        if index not in chunked.pairs:
            raise ValueError(f"the plan computes the loss of {self.units[index].name!r} in chunks: there is none")
        activations = Activations.of(chunked.graph, live_nodes(chunked.graph), chunked.nodes[index])
        logits = [self.operators[pair.linear.name] for pair in chunked.pairs[index]]
        run = _UnitOperators(activations, chunked.nodes[index], inputs, placements)
        return self._policy(index, "none", run, logits)

    def _policy(self, index: int, name: str, run: _UnitOperators, logits: Sequence[Charge] = ()) -> PricedPolicy:
        """``logits``: products that a loss in chunks does once more."""
        unit = self.units[index]

        def local_bytes(value: Value) -> float:
            return float(self.pricing.local_bytes(value, run.placements[value.name]))

        def extra_bytes(extra: Extra) -> float:
            like = run.activations.values[extra.like]
            elements = self.pricing.local_elements(like, run.placements[extra.like])
            return extra.num_bytes * elements / max(1, like.num_elements)

        base, keeps_copies = ("none" if name in ("regather", ON_HOST) else name), name in ("none", ON_HOST)
        rule = kept_under(run.activations, run.nodes, base, compiled=self.compiled)
        copies = dict(self._converted(unit, run))
        roots = {root for root in rule.values if self._answers_for(unit, root)}
        if keeps_copies:
            roots -= {run.activations.roots[value] for value, _ in copies} - self._kept_as_made(run)
        saved = sum(local_bytes(self.values[root]) for root in roots) + sum(map(extra_bytes, rule.extras))
        if keeps_copies:
            saved += sum(self.pricing.local_bytes(self.values[value], where) for value, where in copies)
        repeated = [self.operators[node] for node in rule.recomputed if node in self.operators]
        seconds = sum(charge.compute[0] for charge in (*logits, *repeated))
        launches = float(sum(charge.kernels[0] for charge in (*logits, *repeated)))
        if name == "full":
            for charges, copies_of in ((repeated, 1), (self._converted_again(index, rule.recomputed), unit.count)):
                seconds += sum(charge.communication[0] for charge in charges) / copies_of
                launches += sum(charge.collectives[0] for charge in charges) / copies_of
        elif not keeps_copies:
            seconds += sum(each for each, _ in copies.values())
            launches += sum(times for _, times in copies.values())
        peak = working_peak(
            run.activations,
            run.nodes,
            base,
            local_bytes=local_bytes,
            extra_bytes=extra_bytes,
            compiled=self.compiled,
        )
        peak += max((self._exchanged_bytes(run, name) for name in run.nodes if name in run.inputs), default=0.0)
        visiting = self._visiting_bytes(unit)
        saved += visiting if base != "full" else 0.0
        if name != ON_HOST:
            return PricedPolicy(seconds, launches, saved, peak + visiting)
        entered = sum(local_bytes(self.values[root]) for root in roots if root in unit.carried)
        carried = saved - entered  # of this unit, and as much of the one beside it
        return PricedPolicy(seconds, launches, entered, peak + visiting + 2 * carried, host_bytes=carried)

    def _converted_again(self, index: int, recomputed: Collection[str]) -> list[Charge]:
        """The conversions of all copies, but for what operators produce that do not run again."""
        unit = self.units[index]
        copies = [unit.nodes] if unit.run is None else self.runs[unit.run].copies
        idle = {name for copy in copies for own, name in zip(unit.nodes, copy) if own not in recomputed}
        return [
            charge
            for charge in self.conversions[index]
            if charge.copy is not None or self.maker.get(charge.name) not in idle
        ]

    def _visiting_bytes(self, unit: ModelUnit) -> float:
        """Bytes of tokens that other ranks of ``ep`` sent to experts of this one, and of what goes back: two rows for
        each of a token's experts."""
        if EXPERT not in self.pricing.mesh.names:
            return 0.0
        nodes = [self.nodes[name] for name in unit.nodes if is_experts(self.nodes[name])]
        return sum(2.0 * self.values[node.inputs[1]].shape[-1] * self.local_bytes(node.output) for node in nodes)

    def _exchanged_bytes(self, run: _UnitOperators, name: str) -> float:
        """What a product holds that gathers or scatters its rows itself."""
        node, mesh = run.activations.nodes[name], self.pricing.mesh
        if node.op != LINEAR:
            return 0.0
        source = local_shape(self.values[node.inputs[0]].shape, run.inputs[name][0], mesh)
        output = local_shape(node.output.shape, run.placements[node.output.name], mesh)
        return workspace(source, output) * item_size(node.output.dtype)

    def _answers_for(self, unit: ModelUnit, root: str) -> bool:
        """Whether the unit holds a storage itself: it makes it, or takes it from the unit before."""
        return root in unit.carried or self.maker.get(root) in unit.nodes

    def _kept_values(self, run: _UnitOperators) -> Iterator[tuple[str, Placement]]:
        """Saved inputs of the unit's operators, in the placement in which each operator takes them."""
        for name in run.nodes:
            saved = run.activations.saved_by_node.get(name)
            if saved is None or name not in run.inputs:
                continue
            placements = dict(zip(reversed(run.activations.nodes[name].inputs), reversed(run.inputs[name])))
            yield from ((value, placements[value]) for value in saved.values if value in placements)

    def _converted(
        self, unit: ModelUnit, run: _UnitOperators
    ) -> Iterator[tuple[tuple[str, Placement], tuple[float, int]]]:
        """Saved values that collectives converted to the placement in which they are saved, and seconds and times."""
        for value, target in self._kept_values(run):
            seconds, times, moved, place = 0.0, 0, False, target
            key = (value, self._copy_taken(unit, value))
            while (*key, place) in self.forward_step:
                source, step_seconds = self.forward_step[*key, place]
                moved |= step_between(source, place).collectives[0] is not None
                seconds, times, place = seconds + step_seconds, times + (step_seconds > 0), source
            if moved:
                yield (value, target), (seconds, times)

    def _copy_taken(self, unit: ModelUnit, value: str) -> tuple[int, int] | None:
        """The copy that takes ``value`` from the copy before; None if it is not carried between copies."""
        if unit.run is None:
            return None
        carried = any(names[0] == value for names in self.runs[unit.run].carried)
        return (unit.run, 0) if carried else None

    def _kept_as_made(self, run: _UnitOperators) -> set[str]:
        """Storages that some operator saves unconverted: its outputs, and inputs that needed no conversion."""
        roots = set()
        for name in run.nodes:
            saved = run.activations.saved_by_node.get(name)
            if saved is None or name not in run.inputs:
                continue
            placements = dict(zip(reversed(run.activations.nodes[name].inputs), reversed(run.inputs[name])))
            roots |= {
                run.activations.roots[value]
                for value in saved.values
                if value not in placements or placements[value] == run.placements[value]
            }
        return roots

    # -- bytes --------------------------------------------------------------------------------------------------

    def _placements(self) -> Iterator[tuple[str, Placement]]:
        whole = ("R",) * len(self.pricing.mesh.names)
        for path, value in zip(self.graph.input_paths, self.graph.inputs):
            yield value.name, self.plan.inputs[".".join(map(str, path))].placement
        for state in self.graph.states:
            yield state.value.name, self.plan.states[state.path].placement
        for node in self.graph.nodes:
            places = self.walked.outputs.get(node.name, [whole] * len(node.outputs))
            yield from ((value.name, place) for value, place in zip(node.outputs, places))
        for index, run in enumerate(self.runs):
            for slot, names in enumerate(run.carried):
                yield names[0], self.plan.blocks[index].carried[slot]

    def local_bytes(self, value: Value) -> float:
        """The placement in which the value is produced; for a value carried between copies, as it is handed on."""
        return float(self.pricing.local_bytes(value, self.placements[value.name]))

    def crossing_bytes(self, index: int) -> tuple[float, float]:
        """Bytes that a pipeline sends, for each micro-batch, to a chunk that begins with this unit, and gets back."""
        forward = backward = 0.0
        for name in self.units[index].entering:
            value = self.values[name]
            num_bytes = sum(self.pricing.local_bytes(value, form) for form in self._forms(value).crossing(index))
            forward += num_bytes
            backward += num_bytes if value.requires_grad else 0.0
        return forward, backward

    def _forms(self, value: Value) -> ValueForms:
        """The placements of a value that crosses cuts of the pipeline."""
        mesh = self.pricing.mesh
        if value.name not in self.maker:  # an input of the model, where copies of a block carry it on
            return ValueForms(in_program(self.placements[value.name], value, mesh), {}, ())
        maker = self.nodes[self.maker[value.name]]
        own = self.place.get(maker.name)
        inside, behind = list[Placement](), list[FormUse]()
        for user in self.users[value.name]:
            if user not in self.place:
                continue
            unit, copy = self.place[user]
            repeats = self.units[unit].run is not None
            for form in self._asked(user, value.name):
                form = in_program(form, value, mesh)
                if repeats and (unit, copy) == own:
                    inside.append(form)
                else:
                    behind.append(FormUse(unit, form, repeats))
        steps = ((step[1][0], step[0][2]) for step in self.forward_step.items() if step[0][:2] == (value.name, None))
        outputs = dict(zip((one.name for one in maker.outputs), self.walked.outputs[maker.name]))
        following = [in_program(form, value, mesh) for form in self._handed_on(maker.name, value.name)]
        return ValueForms(
            in_program(outputs[value.name], value, mesh), sources_of(steps, value, mesh), behind, inside, following
        )

    def _asked(self, user: str, value: str) -> list[Placement]:
        """The placements in which an operator takes a value; of what enters a block, the one that copies hand on."""
        run = self.units[self.place[user][0]].run
        if run is not None:
            for slot, names in enumerate(self.runs[run].carried):
                if names[0] == value:
                    return [self.plan.blocks[run].carried[slot]]
        inputs = zip(reversed(self.nodes[user].inputs), reversed(self.walked.inputs[user]))
        return [form for name, form in inputs if name == value]

    def _handed_on(self, maker: str, value: str) -> Iterator[Placement]:
        """The placement in which copies of a block hand on what this value is in the last one."""
        if maker not in self.place:
            return
        unit, copy = self.place[maker]
        run = self.units[unit].run
        if run is None:
            return
        first = self.nodes[self.runs[run].copies[0][self.runs[run].copies[copy].index(maker)]]
        place = [one.name for one in self.nodes[maker].outputs].index(value)
        for slot, name in enumerate(self.runs[run].carried_output):
            if name == first.outputs[place].name:
                yield self.plan.blocks[run].carried[slot]

    # -- parameters ---------------------------------------------------------------------------------------------

    def states(self, *, tied_apart: bool, joins_ends: bool = False) -> Mapping[int, list[StateOfUnit]]:
        """Parameters and buffers of one copy of each unit.

        One that several units use belongs to the first of them, or with ``tied_apart`` to each; where the schedule
        joins the ends of the pipeline on one rank, the last unit has what the first has.
        """
        states: dict[int, list[StateOfUnit]] = {index: [] for index in range(len(self.units))}
        names = self.pricing.mesh.names
        for state in self.graph.states:
            if state.value.kind not in ("parameter", "buffer"):
                continue
            users = sorted({self.place[name] for name in self._readers(state.value.name)})
            units = list(dict.fromkeys(unit for unit, _ in users))
            if joins_ends and units[:1] == [0] and units[-1] == len(self.units) - 1 > 0:
                units.pop()
            elements = self.pricing.local_elements(state.value, self.plan.states[state.path].placement)
            apart = tied_apart and state.value.kind == "parameter"
            expert = any(is_experts(self.nodes[name]) for name in self._readers(state.value.name))
            expert |= (
                EXPERT in names and shard_dim(self.plan.states[state.path].placement[names.index(EXPERT)]) is not None
            )
            for unit in units if apart else units[:1]:
                copies = [copy for owner, copy in users if owner == unit]
                if copies[0] == 0:
                    states[unit].append(StateOfUnit(state.value, elements, len(copies), len(units) > 1, expert))
        return states

    def _readers(self, name: str) -> Iterator[str]:
        """Operators of units that use a state, also through views and casts of it."""
        for user in self.users[name]:
            derived = [value.name for value in self.nodes[user].outputs if value.name in self.pricing.states]
            if derived:
                for value in derived:
                    yield from self._readers(value)
            elif user in self.place:
                yield user


@dataclass(frozen=True, eq=False)
class PricedStage:
    """A walk of the whole graph and its units (None on a given mesh), at the prices of a pipeline stage's devices."""

    walk: GraphWalk
    units: UnitPrices | None
