"""One chunk's layers played on the two streams of its device: compute and communication.

A layer's parameters are gathered while the layer before it computes (one layer ahead, also from one action to the
next); its gradients are reduced once its backward is done, behind the gather that is already under way. The
communication stream takes one thing at a time.

The play only takes maxima and adds constants, so a whole action is a linear map over (max, +): ``action_map`` finds its
coefficients by playing the layers once from each unit vector, and the pipeline then costs a few additions an action,
however many layers a chunk has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cost_models.step import ChunkCosts, LayerCosts

NEVER = float("-inf")

#: Coefficients of ``Streams``, in its order.
Row = tuple[float, float, float, float]

#: (stream, label, start, end), called for each stretch of work played.
Recorder = Callable[[str, str, float, float], None]


class LayerTask(NamedTuple):
    """One layer in one action, in seconds: parameters to gather first, compute, gradients to reduce after."""

    gather: float
    compute: float
    reduce: float


class Streams(NamedTuple):
    """When the streams of a device are free (seconds).

    Attributes:
        ready: the compute stream may start the action (its input is there).
        before: the compute stream finished the action before.
        communication: the communication stream is free.
        issue: from when on the next gather may be under way.
    """

    ready: float
    before: float
    communication: float
    issue: float


class StreamsAfter(NamedTuple):
    """Streams after an action: when compute is done, when communication is, when the next gather may start."""

    compute: float
    communication: float
    issue: float


class ActionMap(NamedTuple):
    """An action as a (max, +) map from ``Streams`` to ``StreamsAfter``: rows of four coefficients each.

    ``pending`` is the seconds of the last layer's reduction, which starts after the next action's first gather.
    """

    compute: Row
    communication: Row
    issue: Row
    pending: float


def layer_tasks(chunk: ChunkCosts, kind: str, *, last: bool) -> tuple[LayerTask, ...]:
    """The layers of ``chunk`` in the order in which an action of ``kind`` ("F", "B", "I", "W") runs them.

    ``last``: the chunk's last gradients of the step, so that the reduction of the step follows each layer. Weight
    gradients of a split backward need no parameters.
    """
    one = _TASK_OF[kind]
    layers = chunk.layers if kind == "F" else chunk.layers[::-1]
    return tuple(one(layer, last) for layer, count in layers for _ in range(count))


def play(
    tasks: tuple[LayerTask, ...],
    streams: Streams,
    pending: float,
    *,
    label: str = "",
    before: str = "",
    record: Recorder | None = None,
) -> StreamsAfter:
    """Play ``tasks`` from ``streams`` on; ``pending`` is the reduction (seconds) left by the action before.

    ``label`` and ``before`` name this action and that one to ``record``.
    """
    reduced = before
    compute, pending_from, communication, issue = streams
    for gather, seconds, reduce in tasks:
        start = compute
        if gather:
            gather_from = max(communication, issue)
            communication = gather_from + gather
            start = max(start, communication)
            _note(record, "communication", f"gather {label}", gather_from, communication)
        if pending:
            communication = _reduce(communication, pending_from, pending, reduced, record)
        issue, compute = start, start + seconds
        _note(record, "compute", label, start, compute)
        pending_from, pending, reduced = compute, reduce, label
    if not tasks and pending:  # a chunk without layers still lets the reduction before it run
        communication = _reduce(communication, pending_from, pending, reduced, record)
    return StreamsAfter(compute, communication, issue)


def action_map(tasks: tuple[LayerTask, ...], pending: float) -> ActionMap:
    """The coefficients of ``play`` for these tasks, after an action that left a reduction of ``pending`` seconds."""
    units = (Streams(*(0.0 if i == j else NEVER for j in range(4))) for i in range(4))
    columns = [play(tasks, unit, pending) for unit in units]
    compute, communication, issue = zip(*columns)
    return ActionMap(compute, communication, issue, tasks[-1].reduce if tasks else 0.0)


def _reduce(free: float, ready: float, seconds: float, label: str, record: Recorder | None) -> float:
    start = max(free, ready)
    _note(record, "communication", f"reduce {label}", start, start + seconds)
    return start + seconds


def _note(record: Recorder | None, stream: str, label: str, start: float, end: float) -> None:
    if record is not None and end > start:
        record(stream, label, start, end)


def _forward(layer: LayerCosts, last: bool) -> LayerTask:
    return LayerTask(layer.gather_forward, layer.forward, 0.0)


def _backward(layer: LayerCosts, last: bool) -> LayerTask:
    return LayerTask(layer.gather_backward, layer.backward, _reductions(layer, last))


def _input_gradients(layer: LayerCosts, last: bool) -> LayerTask:
    return LayerTask(layer.gather_backward, layer.backward - layer.backward_weight, 0.0)


def _weight_gradients(layer: LayerCosts, last: bool) -> LayerTask:
    return LayerTask(0.0, layer.backward_weight, _reductions(layer, last))


def _reductions(layer: LayerCosts, last: bool) -> float:
    return layer.reduce_backward + (layer.reduce_step if last else 0.0)


_TASK_OF: dict[str, Callable[[LayerCosts, bool], LayerTask]] = {
    "F": _forward,
    "B": _backward,
    "I": _input_gradients,
    "W": _weight_gradients,
}
