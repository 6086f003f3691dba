"""What a call changes of a model's state beside its gradients: what forward writes to parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from passes.capture.interpret import operator
from passes.ir.graph import Graph, ParameterWrite
from passes.ir.value_guards import StepResult
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

    def buffers_here(self, state: StepState) -> list[torch.Tensor]:
        """What this rank has of the buffers."""
        names = (name for name in sorted(self.buffers) if name in state.infos)
        return [state.find(name) for name in names if state.is_here(name)]

    def write_parameters(self, state: StepState) -> None:
        """Do the writes to parameters; all ranks must call it.

        Where each element is written from the same element of others that lie alike, every rank writes what it owns;
        else every rank computes the whole.
        """
        for write in self.parameter_writes:
            infos = [state.infos[path] for path in write.paths]
            if write.elementwise and state.lie_alike(infos):
                if state.is_here(write.path):
                    _run(write, {path: state.find(path) for path in write.paths})
            else:
                whole = {path: state.whole(path) for path in write.paths}
                _run(write, whole)
                state.load(write.path, whole[write.path])


@torch.no_grad()
def _run(write: ParameterWrite, parameters: Mapping[str, torch.Tensor]) -> None:
    """Run the steps, of which the last one writes to a tensor of ``parameters``."""
    results: list[Any] = []

    def value(argument: Any) -> Any:
        if isinstance(argument, StepResult):
            return results[argument.step]
        return [value(entry) for entry in argument] if isinstance(argument, (list, tuple)) else argument

    for step in write.steps:
        if step.op == "parameter":
            results.append(parameters[step.args[0]])
        else:
            kwargs = {name: value(argument) for name, argument in step.kwargs}
            results.append(operator(step.op)(*map(value, step.args), **kwargs))
