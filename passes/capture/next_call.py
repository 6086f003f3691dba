"""Whether a model's next call computes what the traced one did, where forward changes state in Python."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from passes.capture.flat_call import FlatCall, placed_output
from passes.capture.python_state import StateChanges
from passes.capture.same_program import same_from_constants, same_graph
from passes.ir.errors import CaptureError, MissingValues
from passes.ir.graph import Graph


class TraceCall(Protocol):
    """Traces the call on a copy of ``model``.

    Args:
        loss_fn: what is called with it; the one of ``call`` if there is none here.
        placed: tensors without data that ``model`` holds, as a call before has placed them.
        returns_placed: whether the graph also returns what the call places in Python.
    """

    def __call__(
        self, model: nn.Module, *, loss_fn: Any = ..., placed: Sequence[torch.Tensor] = (), returns_placed: bool = False
    ) -> tuple[Graph, FlatCall]: ...


def check_next_call(model: nn.Module, graph: Graph, call: FlatCall, trace: TraceCall) -> None:
    """Trace the call that comes after ``call``, and hold its graph against ``graph``.

    What the model keeps for itself and computes from shapes and constants alone (a mask) may come from either call.

    Raises:
        CaptureError: if the next call computes something else, or cannot be traced.
    """
    changes = call.result.changes
    with changes.applied(call.model) as stand_ins:
        try:
            again, next_call = trace(call.model, loss_fn=call.loss_fn, placed=stand_ins)
        except (CaptureError, MissingValues) as error:
            raise CaptureError(
                f"cannot capture {type(model).__name__}: forward changes {changes.describe()}, and the next call "
                f"cannot be traced: {error}"
            ) from error
    constants = _states_of_places(again, next_call)
    if not constants and same_graph(graph, again):
        _announce(model, changes)
        return
    if not constants or not same_from_constants(trace(model, returns_placed=True)[0], again, constants):
        raise CaptureError(
            f"cannot capture {type(model).__name__}: forward changes {changes.describe()} and computes something else "
            "at the next call, which a program does not: pass the number as an argument of forward, or keep it in a "
            "buffer of the model, of its final shape, that tensor operations change"
        )


def _states_of_places(graph: Graph, call: FlatCall) -> dict[str, str]:
    """States of ``graph`` that hold what the call before placed → the output under which that call returns it."""
    tensors = {**call.result.constants, **dict(call.model.named_buffers())}
    identities = {state.value.name: id(tensors.get(state.path)) for state in graph.states}
    return {name: placed_output(call.placed[other]) for name, other in identities.items() if other in call.placed}


def _announce(model: nn.Module, changes: StateChanges) -> None:
    warnings.warn(
        f"forward of {type(model).__name__} changes {changes.describe()}: tracing called it on a copy, and the program "
        "does not change it any more",
        stacklevel=4,
    )
