"""What a call changes of a model's state beside its gradients: what forward writes to parameters and buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from passes.ir.graph import Graph, ParameterWrite
from runtime.execution.step_state import StepState


@dataclass(frozen=True)
class CallEffects:
    """What one kind of call writes.

    Attributes:
        parameter_writes: what is done to parameters before the call.
        buffers: names of the buffers that its programs write.
    """

    parameter_writes: tuple[ParameterWrite, ...]
    buffers: frozenset[str]

    @classmethod
    def of(cls, graph: Graph) -> CallEffects:
        paths = {state.value.name: state.path for state in graph.states}
        written = {paths[node.inputs[0]] for node in graph.nodes if node.writes_buffer and node.inputs[0] in paths}
        return cls(graph.parameter_writes, frozenset(written))

    @torch.no_grad()
    def write_parameters(self, state: StepState) -> None:
        """Each element is written from itself alone, so that every rank writes what it owns of a parameter."""
        for write in self.parameter_writes:
            if state.is_here(write.path):
                namespace, name, overload = write.op.split(".")
                operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
                operator(state.find(write.path), *write.args, **write.kwargs)
