"""The collectives that one unit of a step issues for one micro-batch: forward, backward, and repeated by recomputation.

Repeats follow ``runtime.program_tools.recompute``: ``regather`` and ``selective`` repeat the collectives whose results
autograd would save, with the conversions that lead to them; ``full`` repeats all up to the last tensor that autograd
saves.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from passes.autograd.operator_tables import base_name
from passes.autograd.recompute_policies import Activations
from passes.ir.graph import ITEM_SIZE, Node
from passes.ir.types import I, MeshShape, R, shard_dim
from passes.rules.expert_rules import is_experts
from passes.rules.rule import own_collectives
from passes.shard import Compute, Convert, Local
from passes.shard.operations import Operation
from planner.whole_step.result.einsum_views import operands_taken_as_they_are

#: Phases; the last is once a step, after all backward passes.
FORWARD, BACKWARD, AFTER = "forward", "backward", "after"


_RESHAPE = "aten.reshape"
_MATMUL, _EINSUM, _LINEAR = "aten.matmul", "aten.einsum", "aten.linear"
_ATTENTION = "aten.scaled_dot_product_attention"


#: Places in memory between neighbours along each dim.
Strides = tuple[int, ...]


def _without_gaps(shape: Sequence[int]) -> Strides:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _reordered(node: Node, strides: Strides) -> Strides | None:
    """Strides of what an operator makes that changes the order of dims alone; None for others."""
    operator, dims = base_name(node.op), list(range(len(strides)))
    if operator == "aten.permute":
        dims = [dims[dim] for dim in node.args[1]]
    elif operator == "aten.transpose":
        first, second = node.args[1:3]
        dims[first], dims[second] = dims[second], dims[first]
    else:
        return None
    return tuple(strides[dim] for dim in dims)


def _is_copied(shape: Sequence[int], strides: Strides) -> bool:
    """Whether a linear layer must copy its rows to have all dims but the last as one."""
    rows = [(size, stride) for size, stride in zip(shape[:-1], strides[:-1]) if size > 1]
    return any(outer != size * inner for (_, outer), (size, inner) in itertools.pairwise(rows))


class Sent(NamedTuple):
    """One collective; bytes as in ``Step.num_bytes``."""

    collective: str
    axis: str
    phase: str
    num_bytes: int


def local_bytes(local: Local) -> int:
    """Bytes of one rank's part."""
    num_bytes = ITEM_SIZE[local.value.dtype]
    for size in local.shape:
        num_bytes *= size
    return num_bytes


@dataclass(frozen=True)
class Axes:
    """The mesh of the programs; its batch axis counts the data-parallel size times ``num_microbatches``."""

    mesh: MeshShape
    batch_axis: str
    num_microbatches: int

    def sent(self, collective: str, convert: Convert, phase: str) -> Sent:
        """A collective of a conversion; samples gathered on the batch axis are those of one micro-batch."""
        name = convert.step.axis_name(self.mesh)
        shards = shard_dim(convert.step.source_type) is not None or shard_dim(convert.step.target_type) is not None
        parts = self.num_microbatches if shards and name == self.batch_axis else 1
        return Sent(collective, name, phase, convert.num_bytes // parts)


def sent_once(operations: Sequence[Operation], axes: Axes, live: frozenset[str]) -> Iterator[Sent]:
    """Yield the collectives of conversions and operators, without recomputation.

    Args:
        live: names of the nodes that receive a gradient.
    """
    yield from _forward(operations, axes)
    for operation in operations:
        if isinstance(operation, Convert) and operation.backward:
            yield axes.sent(operation.backward, operation, BACKWARD)
    yield from _own((each for each in _computes(operations) if each.node.name in live), axes.mesh, BACKWARD)


def _forward(operations: Iterable[Operation], axes: Axes) -> Iterator[Sent]:
    for operation in operations:
        if isinstance(operation, Convert) and operation.forward:
            yield axes.sent(operation.forward, operation, FORWARD)
    yield from _own(_computes(operations), axes.mesh, FORWARD)


def _computes(operations: Iterable[Operation]) -> Iterator[Compute]:
    return (operation for operation in operations if isinstance(operation, Compute))


def _own(computes: Iterable[Compute], mesh: MeshShape, phase: str) -> Iterator[Sent]:
    """The collectives that operators issue themselves; those that gather rows together, once for all."""
    together: dict[tuple[str, ...], Counter[Sent]] = defaultdict(Counter)
    for compute in computes:
        if compute.rule is None:
            continue
        sent = [
            Sent(item.collective, axis, phase, num_bytes)
            for item, axis, num_bytes in own_collectives(compute.rule, compute.choices, mesh.names, mesh.sizes)
            if item.phase == phase
        ]
        if compute.gathers_with:
            together[compute.gathers_with] |= Counter(sent)
        else:
            yield from sent
    for once in together.values():
        yield from once.elements()


#: A weight of a unit as in ``StageUnit.states``: the index of the block's root, and the path below it.
Below = tuple[int, str]


def weights_below(locals_: Iterable[Local]) -> frozenset[Below]:
    """The states among locals of a unit."""
    return frozenset((local.state.root or 0, local.state.path) for local in locals_ if local.state is not None)


@dataclass(frozen=True)
class SavedLocals:
    """What autograd saves of the operators of a unit.

    Attributes:
        brought: conversions with a collective whose results are saved, and the conversions that lead to them.
        weights: the parameters that are saved as they were gathered.
        last: index in the unit of the last operator with a saved tensor; −1 if there is none.
    """

    brought: tuple[Convert, ...]
    weights: frozenset[Below]
    last: int

    @staticmethod
    def of(operations: Sequence[Operation], activations: Activations) -> SavedLocals:
        storages = _Storages()
        saved: list[Local] = []
        last = -1
        for place, operation in enumerate(operations):
            if isinstance(operation, Convert):
                storages.converted(operation)
            elif isinstance(operation, Compute):
                storages.computed(operation, activations)
                names = _kept_names(operation, activations)
                if names is not None:
                    last = place
                    copied = storages.copied_by(operation)
                    names = (
                        *(name for name in names if name not in copied),
                        *storages.multiplied_as_they_came(operation),
                    )
                    # One value may come in twice, in two types: both are kept.
                    saved += [local for local in (*operation.outputs, *operation.inputs) if local.value.name in names]
        convert_of = [storages.brought.get(local) for local in saved]
        brought: dict[int, Convert] = {}
        for convert in convert_of:
            while convert is not None and id(convert) not in brought:
                brought[id(convert)] = convert
                convert = storages.brought.get(convert.source)
        weights = frozenset(storages.weight[local] for local in saved if local in storages.weight)
        return SavedLocals(tuple(brought.values()), weights, last)


def _kept_names(compute: Compute, activations: Activations) -> tuple[str, ...] | None:
    """Inputs and outputs of an operator that autograd saves; None if it saves nothing."""
    saved = activations.saved_by_node.get(compute.node.name)
    if saved is None or not (saved.values or saved.extras):
        return None
    if base_name(compute.node.op) == _ATTENTION:
        # Fused on a processor also in float64, for which records know no fused kernel.
        return tuple(local.value.name for local in compute.inputs)
    if is_experts(compute.node):
        others = {local.value.name for local in _changed_by_experts(compute)}
        return tuple(name for name in saved.values if name not in others)
    return saved.values


def _changed_by_experts(compute: Compute) -> tuple[Local, ...]:
    """Operands of experts that are not saved as they come: of experts that are cut each rank numbers its own part, and
    where tokens travel it keeps the rows that it is sent."""
    tokens, ids, _, weights = compute.inputs[:4]
    travels = compute.rule is not None and any(choice.factor in compute.rule.exchanged for choice in compute.choices)
    if travels:
        return tokens, ids
    return (ids,) if weights.shape[0] < weights.value.shape[0] else ()


class _Storages:
    """Owner of each local tensor's memory, through views: the conversion that received it, or a parameter."""

    def __init__(self) -> None:
        self.brought: dict[Local, Convert] = {}
        self.weight: dict[Local, Below] = {}
        self._packed: set[Local] = set()
        #: Views of what a collective brought, with its strides, which may be others than those on one device.
        self._strides: dict[Local, Strides] = {}

    def converted(self, convert: Convert) -> None:
        if convert.forward:
            self.brought[convert.target] = convert
            self._packed.add(convert.target)
        elif {convert.step.source_type, convert.step.target_type} <= {I, R}:  # a rank's part of a tensor is a copy
            self._same(convert.target, convert.source)

    def computed(self, compute: Compute, activations: Activations) -> None:
        for local in compute.inputs:
            if local.state is not None:
                self.weight[local] = (local.state.root or 0, local.state.path)
        for output in compute.outputs:
            root = activations.roots.get(output.value.name, output.value.name)
            if root != output.value.name:
                source = next(
                    (local for local in compute.inputs if activations.roots.get(local.value.name) == root), None
                )
                if source is not None:
                    self._same(output, source)
                    self._viewed(compute, output, source)
            elif base_name(compute.node.op) == _RESHAPE and compute.inputs[0] in self._packed:
                # A collective's result is without gaps, whatever the strides of what was sent: nothing is copied.
                self._packed.add(output)
                self._same(output, compute.inputs[0])

    def _viewed(self, compute: Compute, output: Local, source: Local) -> None:
        """Follow the strides of what a collective brought through a change of the order of its dims."""
        before = _without_gaps(source.shape) if source in self._packed else self._strides.get(source)
        strides = None if before is None else _reordered(compute.node, before)
        if strides is not None:
            self._strides[output] = strides

    def copied_by(self, compute: Compute) -> frozenset[str]:
        """Operands that a linear layer copies, where its record on one device knows of a view: rows with gaps."""
        rows = compute.inputs[0]
        if base_name(compute.node.op) != _LINEAR or rows not in self._strides:
            return frozenset()
        return frozenset((rows.value.name,) if _is_copied(rows.shape, self._strides[rows]) else ())

    def multiplied_as_they_came(self, compute: Compute) -> Iterator[str]:
        """Operands of a product that it keeps as a collective brought them, where its record knows of a copy without
        gaps: what was sent had some."""
        operator, operands = base_name(compute.node.op), compute.inputs
        if operator == _EINSUM:
            equation, shapes = str(compute.node.args[0]), [one.shape for one in operands]
            as_they_came = operands_taken_as_they_are(equation, shapes)
        elif operator == _MATMUL:
            as_they_came = tuple(one.shape[:-2] == compute.outputs[0].shape[:-2] for one in operands)
        elif operator == _LINEAR:
            operands, as_they_came = operands[:2], (True, True)  # the bias is added
        else:
            return
        for place, (one, is_view) in enumerate(zip(operands, as_they_came, strict=True)):
            others = (*operands[:place], *operands[place + 1 :])
            # An operand is needed for the gradients of the others alone.
            if is_view and one in self._packed and any(other.value.requires_grad for other in others):
                yield one.value.name

    def _same(self, view: Local, source: Local) -> None:
        if source in self.brought:
            self.brought[view] = self.brought[source]
        if source.state is not None:
            self.weight[view] = (source.state.root or 0, source.state.path)
        elif source in self.weight:
            self.weight[view] = self.weight[source]


def sent_again(operations: Sequence[Operation], axes: Axes, saved_locals: SavedLocals, policy: str) -> Iterator[Sent]:
    """Yield the forward collectives that the backward pass repeats under a recompute policy."""
    if policy == "none":
        return
    again = operations[: saved_locals.last + 1] if policy == "full" else saved_locals.brought
    yield from (sent._replace(phase=BACKWARD) for sent in _forward(again, axes))


def gathers_in_backward(saved_locals: SavedLocals, policy: str, weights: Collection[Below]) -> bool:
    """Whether the backward pass of a unit gathers again ``weights``, which are freed together after each use:
    without recomputation only if it reads one of them."""
    if policy in ("none", "regather"):
        return not saved_locals.weights.isdisjoint(weights)
    return saved_locals.last >= 0
