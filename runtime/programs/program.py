"""The base class of everything emitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class UnitRunner(Protocol):
    """Runs the units of a program in the order in which it names them."""

    def __call__(self, block: Block, recompute: str) -> Callable[..., Any]: ...


class Block:
    """A stretch of the model with its weights: ``Block(weights)(tensors)`` runs ``forward``.

    Args:
        first_draw: number of the block's first random operator in the model.

    Attributes:
        runner: gives units their weights and recomputes them; None where all weights are there.
    """

    runner: UnitRunner | None = None

    def __init__(self, *weights: Any, first_draw: int = 0) -> None:
        self.weights = weights[0] if len(weights) == 1 else weights
        self.first_draw = first_draw

    def __call__(self, *tensors: Any) -> Any:
        return self.forward(*tensors)

    def forward(self, *tensors: Any) -> Any:
        raise NotImplementedError

    def constants(self) -> tuple[Any, ...]:
        """Tensors that depend on the shapes alone; the last arguments of the program's ``forward``."""
        return ()

    def unit(self, block: Block, *, recompute: str = "none") -> Callable[..., Any]:
        """``block`` as a unit of a step: whoever runs the step gathers its weights and recomputes it."""
        return block if self.runner is None else self.runner(block, recompute)
