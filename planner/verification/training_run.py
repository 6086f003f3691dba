"""A few training steps, unsharded or sharded, through the calls that a user makes, with results to compare."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from passes.capture.call_arguments import ExampleInputs, arguments_of
from planner.verification.comparison import (
    ADAM_EPSILON,
    ADAM_EPSILON_LOW_PRECISION,
    NEGLIGIBLE,
    NEGLIGIBLE_LOW_PRECISION,
    Comparison,
    difference,
    differences,
    gradients_of,
    largest_of,
    make_gradients_dense,
    single_loss,
)
from planner.verification.draws_of_plans import DrawsOfPlans, sequence_of_draws

#: Gradients are clipped to this part of the norm that they have alone.
_CLIPPED = 0.5


@dataclass(frozen=True)
class TrainingCase:
    """The training to run: AdamW steps on one batch, with gradients clipped to half their norm.

    Attributes:
        seed: of the random numbers that programs draw.
        draws_as_plans: on one device, too, random operators draw what programs do.
        unused_draws: places, among the draws of one device, of those that programs leave out.
    """

    batch: ExampleInputs
    loss_fn: Callable[..., Any] | None
    steps: int
    learning_rate: float
    seed: int = 0
    draws_as_plans: bool = False
    unused_draws: frozenset[int] = frozenset()

    def call(self, function: Callable[..., Any], **options: Any) -> Any:
        """``function`` called on the batch."""
        args, kwargs = self.arguments
        return function(*args, **kwargs, **options)

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments_of(self.batch)


@dataclass(frozen=True)
class Results:
    """The results of a run.

    Attributes:
        losses, norms: of every step; the norms are those of all gradients before clipping.
        gradients: of the first step, clipped.
        state: weights and buffers after the last.
        draws: shapes of what the first step drew, of a run that draws as programs do.
    """

    losses: tuple[torch.Tensor, ...]
    norms: tuple[torch.Tensor, ...]
    gradients: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]
    draws: tuple[tuple[int, ...], ...] = ()


def run_alone(model: nn.Module, training: TrainingCase) -> Results:
    """Train ``model`` on this device, by torch alone."""
    draws = DrawsOfPlans(training.unused_draws)
    with sequence_of_draws(training.seed):
        results = _run_alone(model, training, draws)
    return dataclasses.replace(results, draws=tuple(draws.shapes))


def _run_alone(model: nn.Module, training: TrainingCase, draws: DrawsOfPlans) -> Results:
    optimizer: torch.optim.Optimizer | None = None
    losses, norms, gradients = [], [], dict[str, torch.Tensor]()
    for _ in range(training.steps):
        with draws.step() if training.draws_as_plans else contextlib.nullcontext():
            loss = single_loss(model, *training.arguments, training.loss_fn)
            loss.backward()
        make_gradients_dense(model)
        norm = torch.nn.utils.get_total_norm(list(gradients_of(model).values()))
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), _max_norm(norm), norm)
        if optimizer is None:
            gradients = {name: gradient.clone() for name, gradient in gradients_of(model).items()}
            optimizer = _optimizer(model, training, model, gradients)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        norms.append(norm)
    return Results(tuple(losses), tuple(norms), gradients, model.state_dict())


def run_sharded(
    parallel: Any,
    training: TrainingCase,
    alone: Results,
    *,
    like: nn.Module,
    whole: Callable[[torch.Tensor], torch.Tensor],
    first_step: AbstractContextManager[Any],
) -> Results:
    """Train ``parallel`` on all ranks.

    Args:
        alone: results of the same training of ``like``, whose norms set the clipping.
        whole: the value of a scalar that all ranks hold.
        first_step: entered around the first ``train_step``.
    """
    optimizer = _optimizer(parallel, training, like, alone.gradients)
    losses, norms, gradients = [], [], dict[str, torch.Tensor]()
    with sequence_of_draws(training.seed):
        for step in range(training.steps):
            with first_step if step == 0 else contextlib.nullcontext():
                loss = training.call(parallel.train_step)
            norm = parallel.clip_grad_norm_(_max_norm(alone.norms[step]))
            if step == 0:
                gradients = parallel.full_gradients()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(whole(loss))
            norms.append(whole(norm))
    return Results(tuple(losses), tuple(norms), gradients, parallel.full_state_dict())


def compare(results: Results, expected: Results, training: TrainingCase, *, exact: bool) -> list[Comparison]:
    """One comparison for every loss, norm, gradient and weight; ``exact``: of training in float64."""
    floor = (NEGLIGIBLE if exact else NEGLIGIBLE_LOW_PRECISION) * largest_of(expected.gradients)
    comparisons = [
        difference(what, f"{what} {step}", *pair)
        for what, pairs in (
            ("loss", zip(results.losses, expected.losses)),
            ("norm of all gradients", zip(results.norms, expected.norms)),
        )
        for step, pair in enumerate(pairs)
    ]
    comparisons += differences("gradients", results.gradients, expected.gradients, floor=floor)
    # A step moves a weight by about the learning rate, whatever its gradient: errors count against at least that.
    what = f"weights after {training.steps} steps"
    comparisons += differences(what, results.state, expected.state, floor=training.learning_rate, nan_agrees=True)
    return comparisons


def _optimizer(
    module: nn.Module, training: TrainingCase, model: nn.Module, gradients: Mapping[str, torch.Tensor]
) -> torch.optim.Optimizer:
    """AdamW, whose epsilon exceeds those of the first ``gradients`` that are zero but for rounding."""
    exact = all(parameter.dtype == torch.float64 for parameter in model.parameters())
    least, part = (ADAM_EPSILON, NEGLIGIBLE) if exact else (ADAM_EPSILON_LOW_PRECISION, NEGLIGIBLE_LOW_PRECISION)
    epsilon = max(least, part * largest_of(gradients))
    return torch.optim.AdamW(module.parameters(), lr=training.learning_rate, eps=epsilon, foreach=False)


def _max_norm(norm: torch.Tensor) -> float:
    value = _CLIPPED * float(norm)
    return value if 0 < value < float("inf") else 1.0
