"""The interface of a trainer that evaluation and saving use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from runtime.module.parallel_module import ParallelModule


class Training(Protocol):
    """A model in training: a ``Trainer``, to what it is made of.

    Attributes:
        step: updates that were made.
        global_batch: samples of one.
        count_fn: valid labels of a batch.
        predict_fn: ``predict_fn(parallel, batch)``; None for the model's main output.
        predict_with_generate: options of ``generate``; None where outputs are predicted.
        loader_options: of ``DataLoader``.
    """

    step: int
    global_batch: int
    metrics: dict[str, Callable[[Any, Any], Any]]
    loader_options: dict[str, Any]
    count_fn: Callable[[Any], float]
    predict_fn: Callable[..., Any] | None
    predict_with_generate: dict[str, Any] | None

    def collator(self, *, longest: bool) -> Callable[[list[Any]], Any] | None:
        """What makes a batch of samples; None for torch's."""

    def take_up_frozen(self, state: Mapping[str, int], step: int, loader: Any) -> None:
        """Freeze what a checkpoint of ``step`` steps has frozen."""

    @property
    def frozen_state(self) -> dict[str, int] | None:
        """What a checkpoint says of frozen layers."""

    @property
    def parallel(self) -> ParallelModule:
        """The sharded model."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's parameters."""

    @property
    def schedule(self) -> Any:
        """The learning-rate schedule, or None."""
