"""The priced options of each operator: every combination of one choice per mesh axis that can be cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from passes.ir.conversions import cuts
from passes.ir.graph import Node, Value
from passes.ir.types import I, MeshShape, P, Placement, R, SpmdType, shard_dim
from passes.rules.rule import (
    INVARIANT,
    REPLICATE,
    AxisChoice,
    ShardingRule,
    axis_choices,
    cuts_in_order,
    exchanges_equal_rows,
    gathers_rows,
    pieces_of_work,
)
from passes.rules.uneven import Cut, can_run, cuts_of
from planner.sharding_ilp.sharding_prices import Collective, Pricing

RuleFor = Callable[[Node, Mapping[str, Value]], ShardingRule | None]
FlopsOf = Callable[[Node, Mapping[str, Value]], float]
#: The label of a choice, or those of several.
Labels = str | frozenset[str]


@dataclass(frozen=True)
class Option:
    """One way to do one element of the problem (an operator, or the placement of an input or parameter).

    ``compute`` and ``communication`` are seconds of one copy, forward and backward; ``memory`` bytes of one copy.
    ``sent``: of an operator that gathers its input's rows itself, the collectives with all their seconds, hidden ones
    too; ``shared``: the elements that share these, the one that pays for them first.
    """

    labels: tuple[str, ...]
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    compute: tuple[float, float] = (0.0, 0.0)
    collectives: tuple[Collective, ...] = ()
    memory: int = 0
    cut_axes: tuple[bool, ...] = ()
    sent: tuple[Collective, ...] = ()
    shared: tuple[str, ...] = ()

    @property
    def communication(self) -> tuple[float, float]:
        if not self.collectives:
            return 0.0, 0.0
        forward = sum(item.seconds for item in self.collectives if item.phase == "forward")
        return forward, sum(item.seconds for item in self.collectives if item.phase != "forward")

    @property
    def seconds(self) -> float:
        forward, backward = self.compute  # to remember the sum takes longer than to add it up: most communicate nothing
        return forward + backward + (sum(self.communication) if self.collectives else 0.0)


def offered(
    node: Node, values: Mapping[str, Value], rule: ShardingRule | None, mesh: MeshShape
) -> tuple[tuple[AxisChoice, ...], ...]:
    """The choices that each axis offers ``node``, before asking whether they divide together.

    An axis of size 1 has nothing to choose: invariant where there is a gradient, else replicate.
    """
    input_grads = [values[name].requires_grad for name in node.inputs]
    output_grads = [value.requires_grad for value in node.outputs]
    applied_rule = rule or ShardingRule(((),) * len(input_grads), ((),) * len(output_grads), {})
    choices = axis_choices(applied_rule, input_grads=input_grads, output_grads=output_grads)
    if rule is None:
        choices = tuple(choice for choice in choices if choice.label in (REPLICATE, INVARIANT))
    alone = next((choice for choice in choices if choice.label == INVARIANT), choices[0])
    return tuple((alone,) if size == 1 else choices for size in mesh.sizes)


@dataclass(frozen=True)
class JointChoice:
    """One combination of choices over the axes, before asking whether their sizes can make its ``cuts``.

    ``cut_axes`` as in ``Option``; ``communicates``: whether the operator issues collectives itself.
    """

    joint: tuple[AxisChoice, ...]
    labels: tuple[str, ...]
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    cuts: tuple[Cut, ...]
    cut_axes: tuple[bool, ...]
    communicates: bool


class OperatorChoices:
    """What every operator of one graph may choose from, remembered: it is the same for all sizes of axes above 1.

    ``row_axes``: mesh axes on which a product may exchange the shards of its rows itself (``rule.RowShards``).
    """

    def __init__(
        self,
        values: Mapping[str, Value],
        *,
        rule_for: RuleFor,
        flops_of: FlopsOf,
        row_axes: frozenset[str] = frozenset(),
    ) -> None:
        self.values, self.rule_for, self.flops_of, self.row_axes = values, rule_for, flops_of, row_axes
        self._facts: dict[str, tuple[ShardingRule | None, float]] = {}
        self._ways: dict[tuple[object, ...], tuple[JointChoice, ...]] = {}
        self._possible: dict[tuple[int, tuple[int, ...]], tuple[tuple[JointChoice, float], ...]] = {}
        self._distinct: dict[str, list[tuple[ShardingRule | None, tuple[JointChoice, ...]]]] = {}

    def facts(self, node: Node) -> tuple[ShardingRule | None, float]:
        """The sharding rule and the forward flops of ``node``."""
        if node.name not in self._facts:
            self._facts[node.name] = (self.rule_for(node, self.values), self.flops_of(node, self.values))
        return self._facts[node.name]

    def ways(
        self, node: Node, mesh: MeshShape, *, fixed: Mapping[str, Labels] | None = None
    ) -> tuple[JointChoice, ...]:
        """Every combination of choices over axes of more than one device (those of one have nothing to choose).

        ``fixed`` names the one choice (by label) that such an axis is left with, or the few. Operators with equal rules
        and combinations get one tuple, by whose identity they are told to be alike.
        """
        label_of = fixed or {}
        several = tuple(size > 1 for size in mesh.sizes)
        key = (node.name, mesh.names, several, tuple(label_of.get(name) for name in mesh.names))
        if key not in self._ways:
            choices = offered(node, self.values, self.facts(node)[0], mesh)
            per_axis = [
                [
                    choice
                    for choice in offered_on_axis
                    if (choice.rows is None or name in self.row_axes)
                    and (not many or _is_allowed(choice.label, label_of.get(name)))
                ]
                for offered_on_axis, name, many in zip(choices, mesh.names, several)
            ]
            rule = self.facts(node)[0]
            joints = (joint for joint in itertools.product(*per_axis) if rule is None or cuts_in_order(rule, joint))
            self._ways[key] = self._shared(node, tuple(self._way(node, joint, several) for joint in joints))
        return self._ways[key]

    def _shared(self, node: Node, ways: tuple[JointChoice, ...]) -> tuple[JointChoice, ...]:
        """The tuple that an operator with an equal rule has already, if there is one."""
        rule, distinct = self.facts(node)[0], self._distinct.setdefault(node.op, [])
        for other_rule, other in distinct:
            if ways == other and rule == other_rule:
                return other
        distinct.append((rule, ways))
        return ways

    def _way(self, node: Node, joint: tuple[AxisChoice, ...], several: Sequence[bool]) -> JointChoice:
        placements = list(zip(*((*choice.inputs, *choice.outputs) for choice in joint)))
        inputs = [self.values[name] for name in node.inputs]
        rule = self.facts(node)[0]
        return JointChoice(
            joint=joint,
            labels=tuple(choice.label for choice in joint),
            inputs=tuple(placements[: len(node.inputs)]),
            outputs=tuple(placements[len(node.inputs) :]),
            cuts=cuts_of(rule, joint, inputs, node.outputs),
            cut_axes=tuple(choice.factor is not None or not many for choice, many in zip(joint, several)),
            communicates=any(choice.reductions for choice in joint),
        )

    def possible(
        self, node: Node, ways: tuple[JointChoice, ...], sizes: tuple[int, ...]
    ) -> tuple[tuple[JointChoice, float], ...]:
        """Those of its ``ways`` that axes of these sizes can run, with the pieces that each divides the work into."""
        key = id(ways), sizes  # of a tuple that operators with equal rules share, and that is kept
        if key not in self._possible:
            rule = self.facts(node)[0]
            self._possible[key] = tuple(
                (choice, pieces_of_work(rule, choice.joint, sizes))
                for choice in ways
                if can_run(node.op, choice.cuts, sizes) and exchanges_equal_rows(rule, choice.joint, sizes)
            )
        return self._possible[key]


def operator_options(
    node: Node,
    offers: OperatorChoices,
    pricing: Pricing,
    *,
    live: bool,
    saved: Sequence[bool],
    fixed: Mapping[str, Labels] | None = None,
) -> list[Option]:
    """All options of an operator in which axes can cut factors and tensors so, and that finite seconds suffice for; of
    several that give the same placements only the cheapest. Those of alike operators are worked out once.

    ``saved`` says which outputs stay in memory for the backward pass; ``fixed`` is as in ``OperatorChoices.ways``.
    """
    ways, likeness = offers.ways(node, pricing.mesh, fixed=fixed), pricing.likeness(node, offers.values)
    if likeness is None:
        return _priced_options(node, ways, offers, pricing, live=live, saved=saved)
    key = (likeness, id(ways), live, tuple(saved))
    if key not in pricing.options:
        pricing.options[key] = ways, _priced_options(node, ways, offers, pricing, live=live, saved=saved)
    return list(pricing.options[key][1])


def _priced_options(
    node: Node,
    ways: tuple[JointChoice, ...],
    offers: OperatorChoices,
    pricing: Pricing,
    *,
    live: bool,
    saved: Sequence[bool],
) -> list[Option]:
    values = offers.values
    rule, flops = offers.facts(node)
    best: dict[tuple[object, ...], Option] = {}
    for choice, cut in offers.possible(node, ways, pricing.mesh.sizes):
        inputs, outputs, communicates = choice.inputs, choice.outputs, choice.communicates
        compute = pricing.compute(node, values, inputs, outputs, flops=flops, cut=cut, live=live)
        option = Option(
            labels=choice.labels,
            inputs=inputs,
            outputs=outputs,
            compute=compute,
            collectives=pricing.reductions(rule, choice.joint, beside=compute, live=live) if communicates else (),
            sent=pricing.sent(rule, choice.joint, live=live) if communicates and gathers_rows(choice.joint) else (),
            memory=sum(pricing.local_bytes(v, where) for v, where, keep in zip(node.outputs, outputs, saved) if keep),
            cut_axes=choice.cut_axes,
        )
        if rule is not None and rule.exchanged and math.isinf(option.seconds):
            continue  # it needs a collective that there is not
        cheapest = best.get((inputs, outputs))
        if option.seconds < (math.inf if cheapest is None else cheapest.seconds):
            best[inputs, outputs] = option
    return list(best.values())


def _is_allowed(label: str, allowed: Labels | None) -> bool:
    if allowed is None:
        return True
    return label == allowed if isinstance(allowed, str) else label in allowed


def keeps_buffer(where: Placement, held: Placement) -> bool:
    """Whether a buffer that is ``held`` so can be written as ``where`` without a conversion, whose copy it would be."""
    return P not in where and all(shard_dim(one) == shard_dim(other) for one, other in zip(where, held, strict=True))


def placements_of(value: Value, types: Sequence[Sequence[SpmdType]], mesh: MeshShape) -> list[Placement]:
    """Every placement with one of ``types`` per axis that can cut the value."""
    return [where for where in itertools.product(*types) if cuts(where, value.shape, mesh)]


def whole_type(value: Value) -> SpmdType:
    """The type of a value that is the same on all ranks and stays so: I with a gradient, else R."""
    return I if value.requires_grad else R


def placement_option(where: Placement, memory: int = 0) -> Option:
    """An option of a source: it only has an output."""
    return Option(labels=where, inputs=(), outputs=(where,), memory=memory)
