"""Losses that call the model themselves, as transformers' ``compute_loss`` does: with other inputs, or twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

Loss = TypeVar("Loss", bound=Callable[..., Any])
_MARK = "calls_model"


def calling_model(loss_fn: Loss) -> Loss:
    """Mark ``loss_fn``: its first argument is the model in the place of the model's outputs."""
    setattr(loss_fn, _MARK, True)
    return loss_fn


def calls_model(loss_fn: Any) -> bool:
    """Whether a loss function is marked by ``calling_model``."""
    return bool(getattr(loss_fn, _MARK, False))


class CalledModel:
    """A model that remembers what it returned last.

    Args:
        extra: arguments of each call that does not give them itself.
        for_loss: what the loss function gets of the model's outputs.

    Attributes:
        stands_for: the model.
        outputs: of the last call.
    """

    def __init__(self, model: nn.Module, extra: Mapping[str, Any], *, for_loss: Callable[[Any], Any]) -> None:
        self.stands_for, self._extra, self._for_loss = model, extra, for_loss
        self._outputs: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._outputs = [self.stands_for(*args, **{**self._extra, **kwargs})]
        return self._for_loss(self._outputs[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stands_for, name)

    @property
    def outputs(self) -> Any:
        if not self._outputs:
            raise ValueError(
                "the loss function does not call the model that it is given, so nothing is planned: let it call its "
                "first argument, not a model that it knows from elsewhere"
            )
        return self._outputs[0]
