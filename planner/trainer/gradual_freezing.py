"""Layers that a trainer freezes while it trains: which are, what it goes on under then, and what is read of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from planner.activation_cache.activation_cache import ActivationCache
from planner.changing.freezing import Freezing
from planner.engine_under_another_plan import LASTING
from planner.training_timeline import first_parameters, frozen_modules, layers_of
from runtime.migration.move_price import REPLAN_SECONDS, ReplanDecision
from runtime.module.parallel_module import ParallelModule


class GradualFreezing:
    """What is frozen of a model in training.

    Args:
        model: as it was handed over, whose layers are counted.
        target: of the trainer, to go on under where ``freezing`` names none.
        options: of ``planner.compile``, for every plan.
        pins: a target → constraints that give every data rank its own samples.

    Attributes:
        decision, frozen: how many decisions there were, and how many layers are frozen.
        cache: None where ``freezing`` has none.

    Raises:
        ValueError: for another number of layers than the policy's, and layers that the model has not.
    """

    def __init__(
        self,
        freezing: Freezing,
        model: nn.Module,
        parallel: ParallelModule,
        target: Any,
        options: Mapping[str, Any],
        pins: Callable[[Any], Mapping[str, Any]],
    ) -> None:
        self.freezing, self.layers = freezing, list(freezing.layers) or layers_of(model)
        freezing.check_layers(self.layers)
        paths = dict(model.named_modules())
        for layer in self.layers:
            if layer not in paths:
                raise ValueError(f"the model has no layer {layer!r} that could be frozen")
        self.decision = self.frozen = 0
        self.cache: ActivationCache | None = None
        if (room := freezing.cache) is not None:
            self.cache = ActivationCache(
                parallel,
                memory_bytes=room.memory_bytes,
                disk_bytes=room.disk_bytes,
                folder=room.folder,
                bytes_per_second=room.bytes_per_second,
            )
        self._model, self._parallel = model, parallel
        self._targets = list(freezing.targets) or [target]
        self._options = {name: value for name, value in options.items() if name not in LASTING}
        pinned = {name: pin for each in self._targets for name, pin in pins(each).items()}
        if pinned:
            self._options["constraints"] = {**pinned, **dict(self._options.get("constraints") or {})}
        self._norms: list[float] = []

    def is_due(self, step: int, *, epoch_ends: bool) -> bool:
        """Whether there is a decision after ``step`` steps."""
        return epoch_ends if self.freezing.every is None else step % self.freezing.every == 0

    def take_norms(self) -> None:
        """Before gradients are dropped: their norms by layer, for the decision after this step; all ranks must call."""
        self._norms = self._parallel.gradient_norms(self.layers) if self.frozen < len(self.layers) else []

    def decide(
        self, optimizer: torch.optim.Optimizer, *, remaining_steps: int, steps_of_epoch: int
    ) -> ReplanDecision | None:
        """Freeze what the policy says; what is gone on under then, None where nothing changes or no step is left."""
        self.decision += 1
        frozen = self.freezing.policy.next(self.decision, self.frozen, self._norms)
        if frozen == self.frozen:
            return None
        self.frozen = frozen
        return self._go_on(optimizer, remaining_steps, steps_of_epoch)

    def take_up(
        self, state: Mapping[str, int], optimizer: torch.optim.Optimizer, *, remaining_steps: int, steps_of_epoch: int
    ) -> None:
        """Freeze what was frozen when a checkpoint was written, before that is loaded."""
        self.decision, self.frozen = state["decision"], state["frozen"]
        if self.frozen:
            self._go_on(optimizer, remaining_steps, steps_of_epoch)

    def state_dict(self) -> dict[str, int]:
        return {"decision": self.decision, "frozen": self.frozen}

    def set_modes(self) -> None:
        """Frozen layers are in evaluation mode, and so are modules without parameters that stand before them."""
        for path in frozen_modules(self._model, self.layers, self.frozen):
            self._parallel.get_submodule(path).eval()

    def train_step(self, batch: Mapping[str, Any], *, local_inputs: bool) -> torch.Tensor | None:
        """A step that reads what is cached; None where nothing is."""
        if self.cache is None or self.cache.after is None:
            return None
        return self.cache.train_step(**batch, local_inputs=local_inputs)

    def _go_on(
        self, optimizer: torch.optim.Optimizer, remaining_steps: int, steps_of_epoch: int
    ) -> ReplanDecision | None:
        names = first_parameters(self._model, self.layers[: self.frozen])
        for name, parameter in self._parallel.named_parameters():
            if name in names:
                parameter.requires_grad_(False)
        self._parallel.train()
        self.set_modes()
        if remaining_steps < 1:
            return None
        seconds = self.freezing.replan_seconds
        replan_seconds = REPLAN_SECONDS if seconds is None else seconds
        if self.cache is None:
            return self._parallel.replan_if_it_pays(
                self._targets, optimizer, remaining_steps=remaining_steps, replan_seconds=replan_seconds,
                **self._options,
            )  # fmt: skip
        return self.cache.replan_if_it_pays(
            self._targets, optimizer, after=self.layers[self.frozen - 1], remaining_steps=remaining_steps,
            steps_of_epoch=steps_of_epoch, replan_seconds=replan_seconds, required=False, **self._options,
        )  # fmt: skip
