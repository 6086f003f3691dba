"""The base class of everything emitted."""

from __future__ import annotations

from typing import Any


class Block:
    """A stretch of the model with its weights: ``Block(weights)(tensors)`` runs ``forward``."""

    def __init__(self, *weights: Any) -> None:
        self.weights = weights[0] if len(weights) == 1 else weights

    def __call__(self, *tensors: Any) -> Any:
        return self.forward(*tensors)

    def forward(self, *tensors: Any) -> Any:
        raise NotImplementedError

    def constants(self) -> tuple[Any, ...]:
        """Tensors that depend on the shapes alone; the last arguments of the program's ``forward``."""
        return ()
