"""Run the steps of value guards on real tensors, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from passes.capture.interpret import operator
from passes.ir.value_guards import GuardReading, GuardStep, Path, StepResult, ValueGuards
from passes.torch_compat.tracer_questions import outside_of_tracing

#: Gives the values of an input by its path, of a buffer by its name.
Lookup = Callable[[Any], torch.Tensor]


class StepValues:
    """Results of steps, run one after another.

    Args:
        inputs, buffers: values of what the steps start from; what they raise is raised by ``run``.
    """

    def __init__(self, inputs: Lookup, buffers: Lookup) -> None:
        self._inputs = inputs
        self._buffers = buffers
        self.results: list[Any] = []

    def run(self, step: GuardStep) -> None:
        """Add the result of the next step."""
        self.results.append(self._result(step))

    def read(self, source: StepResult) -> Any:
        """What Python sees of a result: a number, a flag, or the shapes of all its tensors."""
        return readable(self.results[source.step])

    def _result(self, step: GuardStep) -> Any:
        match step.op:
            case "input":
                return _on_host(self._inputs(step.args[0]), copied=step.writes)
            case "buffer":
                return _on_host(self._buffers(step.args[0]), copied=step.writes)
            case "literal":
                return _literal(*step.args)
            case "held":
                return _on_host(step.args[0].tensor, copied=step.writes)
            case "blank":
                shape, dtype = step.args
                return torch.zeros(shape, dtype=dtype)
            case "item":
                return self._value(step.args[0])[step.args[1]]
            case "tolist":
                return self._value(step.args[0]).tolist()
        kwargs = {name: self._value(argument) for name, argument in step.kwargs}
        return operator(step.op)(*map(self._value, step.args), **kwargs)

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, StepResult):
            return self.results[argument.step]
        if isinstance(argument, GuardStep):
            return self._result(argument)
        if isinstance(argument, tuple):
            return [self._value(item) for item in argument]
        return argument


def readable(result: Any) -> Any:
    """A number or flag as it is; tensors as their shapes."""
    if isinstance(result, torch.Tensor):
        return tuple(result.shape)
    if isinstance(result, (list, tuple)):
        return tuple(map(readable, result))
    return result


def first_difference(
    guards: ValueGuards, inputs: Mapping[Path, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> tuple[GuardReading, Any] | None:
    """The first of ``differences``; None if the guards hold."""
    return next(iter(differences(guards, inputs, buffers, most=1)), None)


def differences(
    guards: ValueGuards,
    inputs: Mapping[Path, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    *,
    most: int | None = None,
) -> list[tuple[GuardReading, Any]]:
    """The readings that are other ones on these tensors, and what they are, as far as the steps can run.

    Args:
        most: stop behind so many.

    Raises:
        KeyError: for a tensor that is read and not there.
    """
    different: list[tuple[GuardReading, Any]] = []
    values = StepValues(inputs.__getitem__, buffers.__getitem__)
    with outside_of_tracing():
        for entry in guards.entries:
            if isinstance(entry, GuardStep):
                try:
                    values.run(entry)
                except (RuntimeError, IndexError, ValueError) as error:
                    # Operators that cannot run on these values would not have been reached with them.
                    return [*different, (GuardReading(StepResult(0), "a result", f"at {entry.op}"), str(error))]
            else:
                value = values.read(entry.source)
                if not same_reading(value, entry.expected):
                    different.append((entry, value))
            if len(different) == most:
                break
    return different


def same_reading(value: Any, expected: Any) -> bool:
    """Whether Python cannot tell two readings apart; nan is equal to itself, and 0.0 is not -0.0."""
    return type(value) is type(expected) and repr(value) == repr(expected)


def _on_host(tensor: torch.Tensor, *, copied: bool) -> torch.Tensor:
    """On the CPU, without its gradient."""
    return tensor.detach().cpu().clone() if copied else tensor.detach().cpu()


def _literal(shape: tuple[int, ...], dtype: torch.dtype, content: bytes) -> torch.Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)
