"""Why operators are split as they are: what each costs, and what every other strategy would cost here and elsewhere."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cost_models import Cluster
from cost_models.short_text import ShortRepr
from passes.ir.derived_values import state_derived
from passes.ir.graph import Graph, Node
from passes.plan import Plan
from passes.plan.stage_table import format_numbers
from passes.plan.text_tables import format_bytes, format_seconds, format_table, table_in_width
from passes.rules import rule_for
from passes.rules.expert_rules import is_experts
from passes.rules.rule import INVARIANT, REPLICATE
from planner.auditing.graph_walk import Charge
from planner.auditing.repriced_step import RepricedStep
from planner.inspection.objective_ledger import ObjectiveLedger, objective_ledger
from planner.inspection.plan_graph import graph_of_plan
from planner.inspection.rival_strategies import ShardingProgram, sharding_program
from planner.sharding_ilp.assignment import Assignment
from planner.sharding_ilp.constraints import match
from planner.sharding_ilp.options import Option
from planner.sharding_ilp.sharding_problem import Element
from planner.whole_step.costs.expert_regions import expert_regions
from planner.whole_step.costs.step_prices import DATA, EXPERT, weight_share

if TYPE_CHECKING:
    from passes.capture.call_arguments import ExampleInputs

#: Share by which bytes may exceed their limit, for rounding.
ROUNDING = 1e-9
#: Operators whose alternatives are searched, and how many of each, unless all are asked for: each is a program.
MAX_SEARCHED, MAX_RIVALS = 6, 8


@dataclass(frozen=True, repr=False)
class RivalStrategy(ShortRepr):
    """One strategy of an operator that the plan does not take, in seconds of the objective.

    Attributes:
        strategy: what each axis cuts.
        here: of the operator itself.
        neighbours: by how much conversions at its neighbours change if all else stays; None if some cannot be done.
        objective: by how much the objective changes, whether all else stays or is chosen again, whichever is faster;
            None if it cannot be.
        memory: bytes that the fullest device then holds; ``fits``: whether they are there.
        reason: why there is no objective.
    """

    strategy: str
    here: float
    neighbours: float | None
    objective: float | None
    memory: float = 0.0
    fits: bool = True
    reason: str = ""


@dataclass(frozen=True, repr=False)
class OperatorReason(ShortRepr):
    """One operator, all copies of its block together.

    Attributes:
        key: of its first copy, as plans name it; ``operator``: what it computes; ``copies``: how many there are.
        strategy: what each axis cuts.
        here: its seconds in the objective; ``conversions``: those of the values that it takes and gives.
        devices: of unequal devices, where its copies run: (pipeline ranks with the name, copies, seconds of ``here``).
        rivals: other strategies, the most promising first; None if they were not searched.
        num_left_out: of how many rivals no more is known than that neighbours make them dearer.
    """

    key: str
    operator: str
    copies: int
    strategy: str
    here: float
    conversions: tuple[tuple[str, float], ...]
    rivals: tuple[RivalStrategy, ...] | None
    num_left_out: int = 0
    devices: tuple[tuple[str, int, float], ...] = ()


@dataclass(frozen=True, repr=False)
class PlanReasons(ShortRepr):
    """The answer to ``planner explain``.

    Attributes:
        name: what was asked about; ``objective``: seconds of the plan.
        operators: those that the name stands for; ``unequal``: whether stages are on unequal devices.
        prices: by what they are of, prices that sum to the objective.
    """

    name: str
    objective: float
    operators: tuple[OperatorReason, ...]
    prices: Mapping[str, float]
    unequal: bool = False

    def __str__(self) -> str:
        return table_in_width(self.table)

    def table(self) -> str:
        """The reasons as text of at most 80 columns."""
        share = sum(reason.here for reason in self.operators) / self.objective if self.objective else 0.0
        count = f"{len(self.operators)} operator{'s' if len(self.operators) != 1 else ''}"
        title = f"{self.name}: {count}, {share:.2%} of {format_seconds(self.objective)} a step"
        legend = (
            "here: seconds of the objective; neighbours: change of conversions if all else\n"
            "stays; step: change of the objective, the rest chosen again where that is faster"
        )
        if self.unequal:
            legend += (
                "\nEach copy is priced on the devices of its stage. What is chosen again is the\n"
                "best in seconds weighted over all devices, as in the search; priced likewise."
            )
        if any(reason.rivals is None for reason in self.operators):
            parts = [title, _overview(self.operators)]
        else:
            parts = [title, legend, *(_operator_text(reason) for reason in self.operators)]
        rows = [[name, format_seconds(seconds)] for name, seconds in self.prices.items()]
        rows.append(["together, the plan's objective", format_seconds(sum(self.prices.values()))])
        return "\n\n".join([*parts, format_table("Where the objective goes", ("what", "seconds"), rows)])


def explain(
    plan: Plan,
    name: str,
    *,
    model: Any = None,
    example_inputs: ExampleInputs | None = None,
    loss_fn: Callable[..., Any] | None = None,
    everything: bool = False,
) -> PlanReasons:
    """Why the operators that ``name`` stands for are split as they are.

    Args:
        name: a module's path, a parameter, an input, an output, a node's key, or a pattern of them (``layers.*.mlp``).
        model, example_inputs, loss_fn: as ``planner.inspection.plan_graph.graph_of_plan``.
        everything: search all alternatives of every operator, however many there are.

    Raises:
        ValueError: if the name stands for nothing (the message has what is spelt like it), or as ``graph_of_plan``.

    Example:
        >>> print(explain(Plan.load("plan.json"), "model.layers.3.mlp.down_proj").table())
    """
    with graph_of_plan(plan, model, example_inputs=example_inputs, loss_fn=loss_fn) as graph:
        names = operators_named(graph, name)
        cluster = Cluster.from_dict(dict(plan.cluster))
        return Explainer(graph, plan, cluster).reasons(name, names, everything=everything)


def operators_named(graph: Graph, name: str) -> tuple[str, ...]:
    """Nodes that a name stands for; of a parameter, input or output those that use or make it.

    Raises:
        ValueError: if there are none; the message has what is spelt like it.
    """
    states = [state.value.name for state in graph.states if _is_any((state.path, *state.aliases), name)]
    inputs = [value.name for path, value in zip(graph.input_paths, graph.inputs) if _is_any((_dotted(path),), name)]
    values = {*states, *inputs, *(value for path, value in graph.outputs.items() if _is_any((path,), name))}
    names = tuple(
        node.name
        for node in graph.nodes
        if not node.constant
        and (
            _is_any((node.key, *_modules(node.module_path)), name)
            or values & {*node.inputs, *(value.name for value in node.outputs)}
        )
    )
    if not names:
        try:
            match(graph, name)
        except ValueError as error:
            raise ValueError(str(error).removeprefix("constraint ")) from error
        raise ValueError(f"no operator uses or makes {name!r}")
    return names


def _is_any(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _dotted(path: Iterable[object]) -> str:
    return ".".join(map(str, path))


def _modules(path: str) -> Iterator[str]:
    """A module and those that it is part of."""
    parts = path.split(".") if path else []
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


class Explainer:
    """Explains operators of one plan; ``states_stay``: other strategies leave parameters and buffers where they are."""

    def __init__(self, graph: Graph, plan: Plan, cluster: Cluster, *, states_stay: bool = False) -> None:
        self.graph, self.plan, self.cluster, self.states_stay = graph, plan, cluster, states_stay
        self.ledger: ObjectiveLedger = objective_ledger(graph, plan, cluster)
        #: Axes on which there is nothing to choose: those that divide the samples of a whole step.
        self.settled = (DATA, EXPERT) if plan.step.decides_units else ()
        self.regions = expert_regions(graph, state_derived(graph), rules=rule_for)
        self.nodes = {node.name: node for node in graph.nodes}
        runs = self.ledger.priced.walk.runs
        self.first = {name: first for run in runs for copy in run.copies for name, first in zip(copy, run.copies[0])}
        self.maker = {value.name: node.name for node in graph.nodes for value in node.outputs}
        self.users: dict[str, list[str]] = {}
        for node in graph.nodes:
            for value in dict.fromkeys(node.inputs):
                self.users.setdefault(value, []).append(node.name)

    def reasons(self, name: str, names: Sequence[str], *, everything: bool) -> PlanReasons:
        firsts = list(dict.fromkeys(self.first.get(node, node) for node in names))
        searched = firsts if everything or len(firsts) <= MAX_SEARCHED else []
        program = self._program() if searched else None
        operators = tuple(self._reason(self.nodes[first], program, everything=everything) for first in firsts)
        unequal = bool(self.plan.step.stage_devices)
        return PlanReasons(name, self.ledger.objective, operators, self._prices(set(firsts)), unequal)

    def _program(self) -> ShardingProgram | None:
        walk = self.ledger.priced.walk
        return sharding_program(self.graph, self.plan, self.cluster, walk, states_stay=self.states_stay)

    # -- what there is ------------------------------------------------------------------------------------------

    def _touched(self, charge: Charge) -> set[str]:
        """First copies of the operators that make or use a converted value."""
        names = [self.maker.get(charge.name, ""), *self.users.get(charge.name, [])]
        return {self.first.get(name, name) for name in names}

    def _prices(self, firsts: set[str]) -> dict[str, float]:
        """Prices that sum to the objective: of these operators, of the others, and of the step around them."""
        prices = dict.fromkeys(("these operators", "their conversions", "other operators", "other conversions"), 0.0)
        for charge, seconds in self.ledger.charges:
            if charge.step is None:
                ours = self.first.get(charge.name, charge.name) in firsts
                prices["these operators" if ours else "other operators"] += seconds
            else:
                prices["their conversions" if self._touched(charge) & firsts else "other conversions"] += seconds
        return {**prices, **self.ledger.rest}

    def _reason(self, node: Node, program: ShardingProgram | None, *, everything: bool) -> OperatorReason:
        here, copies, stages = 0.0, 0, [0.0] * len(self.ledger.stages)
        conversions: dict[str, float] = {}
        for (charge, seconds), parts in zip(self.ledger.charges, self.ledger.by_stage, strict=True):
            if charge.step is None:
                if self.first.get(charge.name, charge.name) == node.name:
                    here, copies = here + seconds, copies + 1
                    stages = [total + part for total, part in zip(stages, parts, strict=True)]
            elif seconds and node.name in self._touched(charge):
                what = self._conversion_text(charge, node)
                conversions[what] = conversions.get(what, 0.0) + seconds
        planned = self.plan.nodes[node.key]
        strategy = self._strategy(node, tuple(planned.strategy))
        reason = OperatorReason(
            node.key, node.op, copies, strategy, here, tuple(conversions.items()), None,
            devices=tuple(self._devices(node, copies, stages)),
        )  # fmt: skip
        if program is None:
            return reason
        rivals, num_left_out = self._rivals(node, program, everything=everything)
        return replace(reason, rivals=tuple(rivals), num_left_out=num_left_out)

    def _devices(self, node: Node, copies: int, seconds: Sequence[float]) -> Iterator[tuple[str, int, float]]:
        """Of unequal devices, those that run copies of an operator."""
        for stage, part in zip(self.ledger.stages, seconds, strict=True):
            here = round(copies * stage.copies[node.name])
            if stage.name and here:
                several = "s" if len(stage.ranks) > 1 else ""
                yield f"rank{several} {format_numbers(list(stage.ranks))}, {stage.name}", here, part

    def _conversion_text(self, charge: Charge, node: Node) -> str:
        assert charge.step is not None
        is_made_here = self.first.get(self.maker.get(charge.name, ""), self.maker.get(charge.name)) == node.name
        changes = [
            f"{source} → {target} on {axis}"
            for axis, source, target in zip(self.plan.mesh.names, *charge.step)
            if source != target
        ]
        return f"{'what it gives' if is_made_here else 'what it takes'}: {', '.join(changes)}"

    def _strategy(self, node: Node, labels: tuple[str, ...]) -> str:
        """What the axes cut; of those that always divide samples only that they do, where no other axis cuts."""
        cuts = {
            axis: label.removeprefix("cut ")
            for axis, label, size in zip(self.plan.mesh.names, labels, self.plan.mesh.sizes)
            if size > 1 and label not in (REPLICATE, INVARIANT)
        }
        experts = ["experts over ep"] if EXPERT in self.settled and self._cuts_experts(node, cuts) else []
        searched = [f"{axis}: {cut}" for axis, cut in cuts.items() if axis not in self.settled]
        samples = [axis for axis in cuts if axis in self.settled and not (experts and axis == EXPERT)]
        if experts or searched or not samples:
            return ", ".join([*experts, *searched]) or "not cut"
        return f"samples over {', '.join(samples)}"

    def _cuts_experts(self, node: Node, cuts: Mapping[str, str]) -> bool:
        """Whether the axis of experts cuts these of an operator, rather than its samples."""
        if EXPERT not in cuts:
            return False
        return is_experts(node) or self.regions.labels.get(node.name) == f"cut {cuts[EXPERT]}"

    # -- what there might be ------------------------------------------------------------------------------------

    def _rivals(self, node: Node, program: ShardingProgram, *, everything: bool) -> tuple[list[RivalStrategy], int]:
        """The rivals that are searched, and how many are not."""
        element = program.problem.elements.get(node.name)
        by_strategy: dict[str, list[Option]] = {}
        for option in () if element is None else element.options:
            by_strategy.setdefault(self._strategy(node, option.labels), []).append(option)
        by_strategy.pop(self._strategy(node, tuple(self.plan.nodes[node.key].strategy)), None)
        assert element is not None or not by_strategy
        own = self._conversions_of(program, None)
        first_look = []
        for strategy, options in by_strategy.items():
            assert element is not None
            here = min(self._price_of(program, node, element, option) for option in options)
            alone = program.alone(node.name, options)
            neighbours = None if alone is None else self._conversions_of(program, alone) - own
            first_look.append((RivalStrategy(strategy, here, neighbours, None), alone, options))
        first_look.sort(key=lambda look: look[0].here + (look[0].neighbours or 0.0))
        searched = first_look if everything else first_look[:MAX_RIVALS]
        rivals = [self._searched(rival, node, program, alone, options) for rival, alone, options in searched]
        return rivals, len(first_look) - len(rivals)

    def _searched(
        self,
        rival: RivalStrategy,
        node: Node,
        program: ShardingProgram,
        alone: Assignment | None,
        options: Collection[Option],
    ) -> RivalStrategy:
        """``rival`` with the faster of two steps: all else stays, or all else is chosen again."""
        steps, reason = [], "no conversions lead to it"
        for assignment in (alone, program.forced(node.name, options)):
            if assignment is not None:
                try:
                    steps.append(program.priced(assignment))
                except ValueError as error:
                    reason = str(error)
        if not steps:
            return replace(rival, reason=reason)
        best = min(steps, key=lambda step: (not self._fits(step), step.seconds.total))
        change = best.seconds.total - self.ledger.objective
        return replace(rival, objective=change, memory=self._fullest(best), fits=self._fits(best))

    def _fits(self, step: RepricedStep) -> bool:
        limits = map(self.plan.step.memory_limit_of, range(len(step.memory)))
        return all(held <= limit * (1.0 + ROUNDING) for held, limit in zip(step.memory, limits, strict=True))

    def _fullest(self, step: RepricedStep) -> float:
        """Bytes of the device that holds most of what it may."""
        limit_of = self.plan.step.memory_limit_of
        return max(enumerate(step.memory), key=lambda held: (held[1] / (limit_of(held[0]) or 1.0), held[1]))[1]

    def _price_of(self, program: ShardingProgram, node: Node, element: Element, option: Option) -> float:
        """An option's part of the objective, all copies together."""
        units = self.ledger.priced.units
        share = 0.0 if units is None else weight_share(node, self.graph.values, units.pricing.states)
        total = 0.0
        for stage in self.ledger.stages:
            priced = program.option_on(stage, element, option)
            seconds = (priced.compute[0] + priced.communication[0], priced.compute[1] + priced.communication[1])
            total += stage.shares[node.name].of(seconds, weight_seconds=share * priced.compute[1])
        return element.copies * total

    def _conversions_of(self, program: ShardingProgram, assignment: Assignment | None) -> float:
        """The conversions' part of the objective; of the plan's own if ``assignment`` is None."""
        if assignment is None:
            return sum(seconds for charge, seconds in self.ledger.charges if charge.step is not None)
        total = 0.0
        for name, tree in assignment.trees.items():
            stream = program.problem.streams[name]
            for stage in self.ledger.stages:
                shares = stage.conversion_shares(stream.value.name)
                for item in (program.conversion_on(stage, stream, each) for each in tree):
                    total += shares.of((item.copies * item.arc.forward, item.backward_copies * item.arc.backward))
        return total


def _overview(reasons: Sequence[OperatorReason]) -> str:
    """One line for each operator."""
    rows = [[reason.key, str(reason.copies), reason.strategy, format_seconds(reason.here)] for reason in reasons]
    table = format_table("Operators", ("operator", "copies", "strategy", "here"), rows)
    return f"{table}\n  alternatives are not searched for so many operators: ask for one, or --all"


def _operator_text(reason: OperatorReason) -> str:
    copies = f" ({reason.copies} copies)" if reason.copies > 1 else ""
    rows = [["*", reason.strategy, format_seconds(reason.here), "", "", ""]]
    for rival in reason.rivals or ():
        neighbours, step = _signed(rival.neighbours), _signed(rival.objective)
        remark = rival.reason or ("" if rival.fits else f"needs {format_bytes(rival.memory)}")
        rows.append(["", rival.strategy, format_seconds(rival.here), neighbours, step, remark])
    lines = [
        f"  on {where}: {count:,} {'copy' if count == 1 else 'copies'}, {format_seconds(seconds)}"
        for where, count, seconds in reason.devices
    ]
    lines += [f"  {what}: {format_seconds(seconds)}" for what, seconds in reason.conversions]
    if not reason.rivals:
        lines.append("  nothing else to choose: no axis of the layout may cut it otherwise")
    if reason.num_left_out:
        lines.append(f"  {reason.num_left_out} more that are dearer where they stand (--all searches them)")
    header = ("", "strategy", "here", "neighbours", "step", "")
    return "\n".join([format_table(f"{reason.key}{copies}", header, rows), *lines])


def _signed(seconds: float | None) -> str:
    if seconds is None:
        return "—"
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"
