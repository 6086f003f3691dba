"""What autograd keeps for the backward pass, operator by operator."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from passes.autograd.operator_tables import saves_inputs
from passes.autograd.record import ComputedTensor
from passes.autograd.walk import Kernels, TracedCall, walk
from passes.ir.graph import Graph, Value


@dataclass(frozen=True)
class Extra:
    """A tensor made inside an operator (statistics, a dropout mask, a log-sum-exp): bytes of the whole tensor, and
    the value whose sharding divides it."""

    num_bytes: int
    like: str


@dataclass(frozen=True)
class SavedForBackward:
    """What one operator saves, and the outputs of its expensive kernels.

    Attributes:
        values: inputs and outputs of the node that autograd keeps (several may share one storage).
        extras: what it keeps beyond them.
        is_expensive: whether a matrix product, convolution or fused attention runs inside.
        expensive_values: outputs of such a kernel.
        expensive_extras: what such a kernel returns beyond them (a log-sum-exp; the scores of unfused attention).
        temporaries: the largest tensor made inside that is not kept, if there is any.
    """

    values: tuple[str, ...] = ()
    extras: tuple[Extra, ...] = ()
    is_expensive: bool = False
    expensive_values: tuple[str, ...] = ()
    expensive_extras: tuple[Extra, ...] = ()
    temporaries: tuple[Extra, ...] = ()


def kept_by_autograd(
    graph: Graph,
    live: frozenset[str],
    nodes: Collection[str] | None = None,
    *,
    kernels: Kernels = "gpu",
) -> dict[str, SavedForBackward]:
    """Node name → what PyTorch's autograd keeps for its backward; one entry for each node that is not constant.

    Each distinct call is made once, on tensors without data, under saved-tensor hooks. An operator that torch cannot
    run so keeps its floating-point inputs, unless it is one whose backward needs none.

    Args:
        live: names of the nodes that a gradient comes back to; the others keep nothing.
        nodes: names of the nodes to look at; None for all.
        kernels: ``"gpu"``: fused attention, dropout masks of one byte, and the operators of ``runtime.ops``; ``"cpu"``:
            what PyTorch itself runs on a processor.
    """
    values = graph.values
    calls = walk(graph, nodes, live=live, kernels=kernels)
    return {call.node.name: _kept(call, values, live=call.node.name in live) for call in calls}


def _kept(call: TracedCall, values: Mapping[str, Value], *, live: bool) -> SavedForBackward:
    record, outputs = call.record, tuple(value.name for value in call.node.outputs)
    if record is None:
        keeps = live and saves_inputs(call.node)
        return SavedForBackward(tuple(name for name in call.inputs if keeps and "float" in values[name].dtype))
    return SavedForBackward(
        values=(*(call.inputs[place] for place in record.kept_inputs), *_at(outputs, record.kept_outputs)),
        extras=_extras(call, record.extras),
        is_expensive=record.is_expensive,
        expensive_values=_at(outputs, record.expensive_outputs),
        expensive_extras=_extras(call, record.expensive_made),
        temporaries=_extras(call, (record.temporary,) if record.temporary else ()),
    )


def _at(names: tuple[str, ...], places: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(names[place] for place in places if place < len(names))


def _extras(call: TracedCall, extras: tuple[ComputedTensor, ...]) -> tuple[Extra, ...]:
    groups = {"input": call.inputs, "output": tuple(value.name for value in call.node.outputs)}
    return tuple(Extra(entry.num_bytes, groups[entry.kind][entry.place]) for entry in extras)
