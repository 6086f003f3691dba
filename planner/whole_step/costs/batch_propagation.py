"""Propagate the batch dimension through a graph: the choice of every operator on an axis that divides only the batch.

Data parallelism and micro-batches divide the batch and nothing else, so their axis needs no search: each operator takes
the choice that accepts its inputs without conversion. An operator that mixes samples (statistics of batch norm) needs
the whole batch; the conversion of its input shows this.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from passes.autograd.operator_tables import base_name
from passes.ir.graph import Graph, Node, Value
from passes.ir.types import I, P, R, SpmdType, shard, shard_dim
from passes.rules.rule import AxisChoice, axis_choices
from planner.sharding_ilp.model_figures import batch_size_of
from planner.sharding_ilp.options import RuleFor

#: Cost of each conversion between types, used to rank choices. Only the order matters. A number that is no sum over
#: samples (a penalty on weights) is preferably counted once in a partial sum, before the sum is reduced. A sum that has
#: no gradient can be known before the first micro-batch: it is reduced rather than one with a gradient, and before it
#: is scaled, so that counts are exact and rounded once.
FREE, SLICE, COUNT_ONCE, COUNT_AHEAD, REDUCE, SCATTER, GATHER = 0.0, 1e-3, 0.5, 0.75, 1.0, 1e3, 1e6

_SCALINGS = frozenset(("aten.mul", "aten.div"))


@dataclass(frozen=True)
class Followed:
    """The choices on an axis that divides samples.

    Attributes:
        labels: the choice of each operator, by node name.
        types: type of each value where its operator makes it.
        mixing: names of the values that must be whole over all samples, and of nodes that write a buffer (once a step).
            Scalars that depend on inputs alone are not among them: they are computed before the first sample is run
            (how many labels are valid).
        mixers: names of the nodes that need those values whole, and of those that write a buffer.
        counted_ahead: names of the sums over all samples that depend on parameters and carry no gradient (how many
            tokens chose each expert). A pass without gradients over all micro-batches computes them first.
    """

    labels: Mapping[str, str]
    types: Mapping[str, SpmdType]
    mixing: tuple[str, ...]
    mixers: tuple[str, ...] = ()
    counted_ahead: tuple[str, ...] = ()


def follow_batch(
    graph: Graph,
    *,
    rules: RuleFor,
    skip: Collection[str] = (),
    alias: Mapping[str, str] | None = None,
    repeated: Collection[str] = (),
) -> Followed:
    """The choice of every operator of ``graph`` on an axis that divides the inputs' first dim.

    ``skip``: nodes of later copies of a block; ``alias``: values of the last copy used after the block → the first's;
    ``repeated``: nodes of blocks, whose sums over all samples are not counted ahead.
    Inputs whose first dim is not the batch's stay whole; parameters, buffers and constants do too. What is made of
    those alone is cut along a dim of the batch's length (a token that is expanded to one for each sample), unless that
    dim then proves to be another that is as long by chance: it stays whole where samples mix less for it.
    """
    followed = _follow(graph, rules, skip, alias or {}, repeated, cuts_whole=True)
    if not followed.mixing:
        return followed
    other = _follow(graph, rules, skip, alias or {}, repeated, cuts_whole=False)
    return other if len(other.mixing) < len(followed.mixing) else followed


def _follow(
    graph: Graph,
    rules: RuleFor,
    skip: Collection[str],
    alias: Mapping[str, str],
    repeated: Collection[str],
    *,
    cuts_whole: bool,
) -> Followed:
    """``follow_batch``; ``cuts_whole``: whether what is made of whole values alone may be cut."""
    size = batch_size_of(graph)
    values = graph.values
    types: dict[str, SpmdType] = {}
    for value in graph.inputs:
        cut = bool(value.shape) and value.shape[0] == size and size > 1
        types[value.name] = shard(0) if cut else _whole(value)
    types.update((state.value.name, _whole(state.value)) for state in graph.states)
    labels: dict[str, str] = {}
    mixing: list[str] = []
    mixers: list[str] = []
    ahead: list[str] = []
    behind_ahead: set[str] = set()
    learnt, behind_loss = _learnt(graph), _behind_loss(graph)
    for node in graph.nodes:
        if node.name in skip:
            continue
        types.update((name, types[alias[name]]) for name in node.inputs if name in alias)
        if node.constant:
            types.update((value.name, R) for value in node.outputs)
            continue
        if node.writes_buffer:
            mixing.append(node.name)
            mixers.append(node.name)
        cuts = cuts_whole or not all(types[name] in (R, I) for name in node.inputs)
        counts = node.name in behind_loss
        choice = _best(node, values, types, rules, counts=counts, num_samples=max(1, size) if cuts else None)
        labels[node.name] = choice.label
        types.update(zip((value.name for value in node.outputs), choice.outputs))
        for name, needed in zip(node.inputs, choice.inputs):
            if _effort(types[name], needed, values[name]) < COUNT_AHEAD:
                continue
            if values[name].num_elements == 1 and (name not in learnt or node.name not in behind_loss):
                continue
            is_sum = types[name] == P and needed in (R, I) and not values[name].requires_grad
            if is_sum and node.name not in repeated and name not in behind_ahead:
                ahead.append(name)
                behind_ahead.update(value.name for value in node.outputs)
            else:
                mixing.append(name)
                mixers.append(node.name)
        if not behind_ahead.isdisjoint(node.inputs):
            behind_ahead.update(value.name for value in node.outputs)
    return Followed(
        labels, types, tuple(dict.fromkeys(mixing)), tuple(dict.fromkeys(mixers)), tuple(dict.fromkeys(ahead))
    )


def _learnt(graph: Graph) -> frozenset[str]:
    """Values that depend on a parameter."""
    dependent = {state.value.name for state in graph.states if state.value.kind == "parameter"}
    for node in graph.nodes:
        if not dependent.isdisjoint(node.inputs):
            dependent.update(value.name for value in node.outputs)
    return frozenset(dependent)


def _behind_loss(graph: Graph) -> frozenset[str]:
    """Nodes that the loss depends on (without a loss: any output)."""
    needed_values = {name for path, name in graph.outputs.items() if graph.loss is None or path == graph.loss}
    needed_nodes = set()
    for node in reversed(graph.nodes):
        if any(value.name in needed_values for value in node.outputs):
            needed_nodes.add(node.name)
            needed_values.update(node.inputs)
    return frozenset(needed_nodes)


def _whole(value: Value) -> SpmdType:
    return I if value.requires_grad else R


def _best(
    node: Node,
    values: Mapping[str, Value],
    types: Mapping[str, SpmdType],
    rules: RuleFor,
    *,
    counts: bool,
    num_samples: int | None,
) -> AxisChoice:
    """The choice with the least cost of input conversions; of equal ones the one that divides the work.

    What is made of weights alone is R: its gradient stays partial until the parameter's own is reduced, which happens
    once. What is made of samples and has been reduced is I. ``counts``: the loss depends on it, so that sums without a
    gradient are exact counts for as long as they can be. Of dims only those are cut that hold whole samples
    (``num_samples`` or a multiple; None: none is cut): whatever divides the batch divides them.
    """
    rule = rules(node, values)
    if rule is None or node.writes_buffer:  # what is written here is whole
        return _replicated(node, values)
    input_grads = [values[name].requires_grad for name in node.inputs]
    of_weights = any(input_grads) and all(
        values[name].kind == "parameter" or types[name] == R for name, grad in zip(node.inputs, input_grads) if grad
    )
    choices = [
        choice
        for choice in axis_choices(
            rule, input_grads=input_grads, output_grads=[value.requires_grad for value in node.outputs]
        )
        if choice.rows is None and _cuts_samples(choice, node, values, num_samples)
    ]

    def effort(choice: AxisChoice) -> tuple[float, bool, bool]:
        conversion_effort = sum(
            _effort(types[name], type_, values[name]) for name, type_ in zip(node.inputs, choice.inputs)
        )
        reduction_effort = REDUCE * len(choice.reductions)
        if counts and base_name(node.op) in _SCALINGS and not node.output.requires_grad and choice.outputs[0] == P:
            reduction_effort += REDUCE * _weight(node.output)
        return conversion_effort + reduction_effort, choice.factor is None, (R in choice.outputs) != of_weights

    return min(choices, key=effort)


def _cuts_samples(choice: AxisChoice, node: Node, values: Mapping[str, Value], num_samples: int | None) -> bool:
    """Whether every dim that ``choice`` cuts is as long as a number of whole batches."""
    if num_samples is None:
        return choice.factor is None
    tensors = (*(values[name] for name in node.inputs), *node.outputs)
    cuts = zip(tensors, (*choice.inputs, *choice.outputs))
    dims = ((value, shard_dim(spmd_type)) for value, spmd_type in cuts)
    return all(dim is None or value.shape[dim] % num_samples == 0 for value, dim in dims)


def _replicated(node: Node, values: Mapping[str, Value]) -> AxisChoice:
    grads = [values[name].requires_grad for name in node.inputs]
    inputs = tuple(I if grad else R for grad in grads)
    return AxisChoice(
        "invariant" if any(grads) else "replicate", inputs, tuple(I if v.requires_grad else R for v in node.outputs)
    )


def _effort(have: SpmdType, need: SpmdType, value: Value) -> float:
    if have == need or {have, need} <= {R, I}:
        return FREE
    if have in (R, I) and need == P and value.num_elements == 1:
        return COUNT_ONCE
    if have in (R, I):
        return SLICE if shard_dim(need) is not None and value.kind != "parameter" else SCATTER * _weight(value)
    if have == P:
        known_ahead = need in (R, I) and not value.requires_grad
        return (COUNT_AHEAD if known_ahead else REDUCE) * _weight(value)
    return GATHER


def _weight(value: Value) -> float:
    return 1.0 + math.log2(max(1, value.num_elements))
