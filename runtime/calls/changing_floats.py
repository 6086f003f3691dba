"""Python floats among a call's arguments that change from call to call: inputs of the program, not constants of it.

The first value of a float is a constant, as all arguments that are no tensors. When another comes, the model is traced
with a tensor without dims in its place; where that cannot be (the model branches on the number, or hands it to what
takes only numbers), or would compute in another dtype, each value is traced on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import nn

from passes.capture.nested_values import flatten
from passes.emit import Program
from runtime.calls.model_call import ModelCall

#: The key of an argument: its position or its name.
_Place = int | str


class ChangingFloats:
    """Remembers the first value of every float, and which may be inputs.

    Args:
        model: the dtype of its parameters is what scalars are held in (float32, or float64 if any is).
    """

    def __init__(self, model: nn.Module) -> None:
        self.dtype = torch.float64 if any(p.dtype == torch.float64 for p in model.parameters()) else torch.float32
        self._first: dict[Hashable, Mapping[_Place, float]] = {}
        self._constant: set[tuple[Hashable, tuple[_Place, ...]]] = set()
        self._checked: set[tuple[Hashable, tuple[_Place, ...]]] = set()

    def applied(self, call: ModelCall, prepare: Callable[[ModelCall], Program]) -> ModelCall:
        """``call`` with tensors in the place of the floats that have changed; the ranks must have agreed on it.

        Args:
            prepare: makes the program of a call.
        """
        floats = _floats(call)
        if not floats:
            return call
        kind = (call.shapes, tuple(floats))
        first = self._first.setdefault(kind, floats)
        changed = tuple(place for place, value in floats.items() if repr(value) != repr(first[place]))
        if not changed or (kind, changed) in self._constant:
            return call
        with_inputs = self._with_inputs(call, changed)
        if (kind, changed) not in self._checked:
            try:
                same = _dtypes(prepare(with_inputs)) == _dtypes(prepare(self._with_values(call, first)))
            except ValueError:
                same = False
            (self._checked if same else self._constant).add((kind, changed))
            return with_inputs if same else call
        return with_inputs

    def _with_inputs(self, call: ModelCall, places: tuple[_Place, ...]) -> ModelCall:
        # On the host, as other inputs: they are brought to the device together.
        tensors = {place: torch.tensor(_floats(call)[place], dtype=self.dtype, device="cpu") for place in places}
        return self._with_values(call, tensors)

    def _with_values(self, call: ModelCall, values: Mapping[_Place, Any]) -> ModelCall:
        args = tuple(values.get(place, argument) for place, argument in enumerate(call.args))
        kwargs = {name: values.get(name, argument) for name, argument in call.kwargs.items()}
        args_structure, tensors = flatten(args)
        kwargs_structure, more = flatten(kwargs)
        return ModelCall(args, kwargs, (args_structure, kwargs_structure), {**tensors, **more})


def _floats(call: ModelCall) -> dict[_Place, float]:
    arguments: tuple[tuple[_Place, Any], ...] = (*enumerate(call.args), *call.kwargs.items())
    return {place: value for place, value in arguments if type(value) is float}


def _dtypes(program: Program) -> list[tuple[str, str]]:
    return [(spec.path, spec.dtype) for spec in program.outputs]
