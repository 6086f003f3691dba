"""What each operator may choose from: every combination of one choice per mesh axis that divides, priced."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from passes.ir.conversions import divides
from passes.ir.graph import Node, Value
from passes.ir.types import I, MeshShape, Placement, R, SpmdType
from passes.rules.rule import INVARIANT, REPLICATE, AxisChoice, ShardingRule, axis_choices, pieces_of_work
from planner.search.pricing import Collective, Pricing

RuleFor = Callable[[Node, Mapping[str, Value]], ShardingRule | None]
FlopsOf = Callable[[Node, Mapping[str, Value]], float]


@dataclass(frozen=True)
class Option:
    """One way to do one element of the problem (an operator, or the placement of an input or parameter).

    ``compute`` and ``communication`` are seconds of one copy, forward and backward; ``memory`` bytes of one copy.
    """

    labels: tuple[str, ...]
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    compute: tuple[float, float] = (0.0, 0.0)
    collectives: tuple[Collective, ...] = ()
    memory: int = 0
    cut_axes: tuple[bool, ...] = ()

    @property
    def communication(self) -> tuple[float, float]:
        forward = sum(item.seconds for item in self.collectives if item.phase == "forward")
        return forward, sum(item.seconds for item in self.collectives if item.phase != "forward")

    @property
    def seconds(self) -> float:
        return sum(self.compute) + sum(self.communication)


def offered(
    node: Node, values: Mapping[str, Value], rule: ShardingRule | None, mesh: MeshShape
) -> tuple[tuple[AxisChoice, ...], ...]:
    """The choices that each axis offers ``node``, before asking whether they divide together.

    An axis of size 1 has nothing to choose: invariant where there is a gradient, else replicate.
    """
    input_grads = [values[name].requires_grad for name in node.inputs]
    output_grads = [value.requires_grad for value in node.outputs]
    known = rule or ShardingRule(((),) * len(input_grads), ((),) * len(output_grads), {})
    choices = axis_choices(known, input_grads=input_grads, output_grads=output_grads)
    if rule is None:
        choices = tuple(choice for choice in choices if choice.label in (REPLICATE, INVARIANT))
    alone = next((choice for choice in choices if choice.label == INVARIANT), choices[0])
    return tuple((alone,) if size == 1 else choices for size in mesh.sizes)


def joint_choices(
    node: Node,
    values: Mapping[str, Value],
    rule: ShardingRule | None,
    mesh: MeshShape,
    *,
    fixed: Mapping[str, str] | None = None,
) -> list[tuple[AxisChoice, ...]]:
    """Every combination of choices over the axes in which factors and tensors divide evenly.

    ``fixed`` names the one choice (by label) that an axis is left with.
    """
    sizes = rule.sizes if rule is not None else {}
    left = fixed or {}
    per_axis = [
        [
            choice
            for choice in choices
            if (choice.factor is None or sizes[choice.factor] % size == 0)
            and (size == 1 or choice.label == left.get(name, choice.label))
        ]
        for choices, name, size in zip(offered(node, values, rule, mesh), mesh.names, mesh.sizes)
    ]
    tensors = [*(values[name] for name in node.inputs), *node.outputs]
    found = []
    for joint in itertools.product(*per_axis):
        pieces: dict[str, int] = {}
        for choice, size in zip(joint, mesh.sizes):
            if choice.factor is not None:
                pieces[choice.factor] = pieces.get(choice.factor, 1) * size
        if any(sizes[factor] % count for factor, count in pieces.items()):
            continue
        if all(divides(where, tensor.shape, mesh) for where, tensor in zip(_placements(joint), tensors)):
            found.append(joint)
    return found


def _placements(joint: Sequence[AxisChoice]) -> list[Placement]:
    """Placements of all inputs, then all outputs."""
    return list(zip(*((*choice.inputs, *choice.outputs) for choice in joint)))


def operator_options(
    node: Node,
    values: Mapping[str, Value],
    pricing: Pricing,
    *,
    rule: ShardingRule | None,
    flops: float,
    live: bool,
    kept: Sequence[bool],
    fixed: Mapping[str, str] | None = None,
) -> list[Option]:
    """All options of an operator; of several that give the same placements only the cheapest.

    ``kept`` says which outputs are kept in memory for the backward pass; ``fixed`` is as in ``joint_choices``.
    """
    mesh = pricing.mesh
    best: dict[tuple[object, ...], Option] = {}
    for joint in joint_choices(node, values, rule, mesh, fixed=fixed):
        placements = _placements(joint)
        inputs, outputs = tuple(placements[: len(node.inputs)]), tuple(placements[len(node.inputs) :])
        cut = pieces_of_work(rule, joint, mesh.sizes)
        option = Option(
            labels=tuple(choice.label for choice in joint),
            inputs=inputs,
            outputs=outputs,
            compute=pricing.compute(node, values, inputs, outputs, flops=flops, cut=cut, live=live),
            collectives=pricing.reductions(rule, joint, live=live),
            memory=sum(pricing.local_bytes(v, where) for v, where, keep in zip(node.outputs, outputs, kept) if keep),
            cut_axes=tuple(choice.factor is not None or size == 1 for choice, size in zip(joint, mesh.sizes)),
        )
        known = best.get((inputs, outputs))
        if known is None or option.seconds < known.seconds:
            best[inputs, outputs] = option
    return list(best.values())


def placements_of(value: Value, types: Sequence[Sequence[SpmdType]], mesh: MeshShape) -> list[Placement]:
    """Every placement with one of ``types`` per axis that divides the value."""
    return [where for where in itertools.product(*types) if divides(where, value.shape, mesh)]


def whole_type(value: Value) -> SpmdType:
    """The type of a value that is the same on all ranks and stays so: I with a gradient, else R."""
    return I if value.requires_grad else R


def placement_option(where: Placement, memory: int = 0) -> Option:
    """An option of a source: it only has an output."""
    return Option(labels=where, inputs=(), outputs=(where,), memory=memory)
