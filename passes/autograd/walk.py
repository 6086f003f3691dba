"""Go through a graph call by call, following the strides of every value."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from passes.autograd.operator_tables import is_view
from passes.autograd.record import CallRecord, RecordedOperand
from passes.autograd.recorded_calls import record_call
from passes.ir.graph import Graph, Node, Value

Kernels = Literal["gpu", "cpu"]


@dataclass(frozen=True)
class TracedCall:
    """A node, the names of its distinct inputs, and its record (None: torch cannot make the call without data)."""

    node: Node
    inputs: tuple[str, ...]
    record: CallRecord | None

    @property
    def alias_of(self) -> tuple[str | None, ...]:
        """For each output, the input whose memory it shares."""
        if self.record is None:
            source = self.inputs[0] if is_view(self.node) and self.inputs else None
            return (source,) * len(self.node.outputs)
        return tuple(None if place is None else self.inputs[place] for place in self.record.alias_of)


def walk(
    graph: Graph,
    nodes: Collection[str] | None = None,
    *,
    live: frozenset[str] = frozenset(),
    kernels: Kernels = "gpu",
) -> Iterator[TracedCall]:
    """The calls of ``nodes`` (None: all) in graph order, those to which a gradient comes back (``live``) with it.

    Constant nodes are left out. Values from outside are taken to be contiguous.
    """
    values = graph.values
    strides: dict[str, tuple[int, ...]] = {}
    for node in graph.nodes:
        if node.constant or (nodes is not None and node.name not in nodes):
            continue
        grad = node.name in live
        operands = {name: _operand(values[name], strides.get(name), grad=grad) for name in node.inputs}
        record = record_call(node, operands, grad=grad, kernels=kernels)
        if record is not None:
            strides.update((value.name, stride) for value, stride in zip(node.outputs, record.strides))
        yield TracedCall(node, tuple(dict.fromkeys(node.inputs)), record)


def _operand(value: Value, strides: tuple[int, ...] | None, *, grad: bool) -> RecordedOperand:
    return RecordedOperand(value.shape, strides or contiguous(value.shape), value.dtype, grad and value.requires_grad)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor laid out in the order of its dims."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
