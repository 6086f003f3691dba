"""Linear layers that gather the rows of their input once, as the one operator of several outputs that they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from passes.ir.graph import Ref
from passes.rules.operator_call import GATHERED_LINEARS
from passes.rules.rule import AxisChoice
from passes.shard import Compute, ShardedGraph
from passes.shard.operations import Operation
from passes.shard.rewritten_sections import Body, with_rewritten_sections


def with_shared_gathers(sharded: ShardedGraph) -> ShardedGraph:
    """``sharded`` with one operator for each group of layers that gather together (``Compute.gathers_with``)."""
    return with_rewritten_sections(sharded, _with_joined)


def _with_joined(body: Body) -> Iterator[Operation]:
    groups: dict[tuple[str, ...], list[Compute]] = {}
    for operation in body:
        if isinstance(operation, Compute) and operation.gathers_with:
            groups.setdefault(operation.gathers_with, []).append(operation)
    for operation in body:
        if not isinstance(operation, Compute) or not operation.gathers_with:
            yield operation
        elif operation is groups[operation.gathers_with][0]:
            yield _joined(groups[operation.gathers_with])


def _joined(computes: Sequence[Compute]) -> Compute:
    """One operator for ``computes``: their input, all weights, all biases (None where a layer has none)."""
    first = computes[0]
    if len(computes) == 1:
        return first
    weights = [Ref(each.node.inputs[1]) for each in computes]
    biases = [Ref(each.node.inputs[2]) if len(each.inputs) > 2 else None for each in computes]
    biased = [each for each in computes if len(each.inputs) > 2]
    node = replace(
        first.node,
        op=GATHERED_LINEARS,
        args=(Ref(first.node.inputs[0]), weights, biases),
        kwargs={},
        outputs=tuple(each.node.output for each in computes),
    )
    choices = tuple(
        AxisChoice(
            choice.label,
            (
                choice.inputs[0],
                *(each.choices[axis].inputs[1] for each in computes),
                *(each.choices[axis].inputs[2] for each in biased),
            ),
            tuple(each.choices[axis].outputs[0] for each in computes),
            choice.factor,
            choice.reductions,
            choice.rows,
        )
        for axis, choice in enumerate(first.choices)
    )
    inputs = (first.inputs[0], *(each.inputs[1] for each in computes), *(each.inputs[2] for each in biased))
    return Compute(node, inputs, tuple(each.outputs[0] for each in computes), choices, first.rule)
