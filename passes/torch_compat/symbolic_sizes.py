"""Sizes that a trace leaves open: symbols of torch's shape environment, conditions on them, and numbers for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from passes.torch_compat.tensor_fields import FakeTensorMode

#: A number that a trace computes from sizes.
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def mode_with_symbols() -> FakeTensorMode:
    """A mode for stand-ins of a trace in which sizes may be open."""
    return FakeTensorMode(allow_non_fake_inputs=True, export=True, shape_env=ShapeEnv(tracked_fakes=[]))


class Sizes:
    """Numbers for the symbols of a trace.

    Args:
        environment: of the trace.
        ranges: the bounds of every symbol.
        open_shapes: shapes of the trace's inputs, in which the symbols stand.
        shapes: the same inputs' shapes as numbers.

    Raises:
        ValueError: if the trace does not hold for these shapes.
    """

    def __init__(
        self,
        environment: Any,
        ranges: Any,
        open_shapes: Sequence[Sequence[Any]],
        shapes: Sequence[Sequence[int]],
    ) -> None:
        self._numbers: dict[Any, int] = {}
        pairs = [
            pair
            for of_open, sizes in zip(open_shapes, shapes, strict=True)
            for pair in zip(of_open, sizes, strict=True)
        ]
        for size, number in pairs:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                self._numbers.setdefault(size.node.expr, number)
        for size, number in pairs:
            if self.number(size) != number:
                raise ValueError(f"size {size} of the trace is {self.number(size)}, not {number}")
        for symbol, number in self._numbers.items():
            bounds = ranges.get(symbol)
            if bounds is not None and not bounds.lower <= number <= bounds.upper:
                raise ValueError(f"{symbol} = {number} is not in {bounds}")
        for condition in conditions(environment):
            if not bool(condition.xreplace(self._numbers)):
                raise ValueError(f"the trace holds if {condition}, not for {self._numbers}")

    def number(self, size: Any) -> Any:
        """A size, stride or other number of the trace as one of Python."""
        if not isinstance(size, SYMBOLIC):
            return size
        expression = size.node.expr.xreplace(self._numbers)
        if isinstance(size, torch.SymBool):
            return bool(expression)
        return int(expression) if isinstance(size, torch.SymInt) else float(expression)

    def numbers(self, sizes: Iterable[Any]) -> tuple[int, ...]:
        return tuple(self.number(size) for size in sizes)


def conditions(environment: Any) -> list[Any]:
    """What has to hold of the symbols: every branch that the trace took because of a size."""
    return [environment.replace(guard.expr) for guard in environment.guards]
