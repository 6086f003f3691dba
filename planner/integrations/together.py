"""Several parallel modules, and several optimizers over them, as a checkpoint sees one of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from runtime.module.parallel_module import ParallelModule
from runtime.parameters.offloaded_optimizer import OffloadedOptimizer, update_rule
from runtime.state.owned import Owned


class ModulesTogether:
    """Parallel modules by name, which goes before the names of their tensors."""

    def __init__(self, modules: Mapping[str, ParallelModule]) -> None:
        self._modules = modules

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(f"{part}.{name}" for part, parallel in self._modules.items() for name in parallel.state_names)

    @property
    def plan(self) -> Any:
        """The plan of the last; each must have one.

        Raises:
            ValueError: where one has none yet.
        """
        return [parallel.plan for parallel in self._modules.values()][-1]

    @property
    def layout(self) -> Any:
        return next(iter(self._modules.values())).layout

    def owned(self) -> tuple[Owned, ...]:
        return tuple(
            replace(own, name=f"{part}.{own.name}", aliases=tuple(f"{part}.{alias}" for alias in own.aliases))
            for part, parallel in self._modules.items()
            for own in parallel.owned()
        )

    def wait_for_ranks(self) -> None:
        for parallel in self._modules.values():
            parallel.wait_for_ranks()

    def weights_changed(self) -> None:
        for parallel in self._modules.values():
            parallel.weights_changed()


class OptimizersTogether:
    """Optimizers after one another: the groups of all of them, and the state of each parameter where it is.

    Raises:
        ValueError: if a parameter is in two of them, or one keeps its state on the host.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if any(isinstance(one, OffloadedOptimizer) for one in optimizers):
            raise ValueError(
                "state of several optimizers, one of which keeps it on the host: save each with a "
                "planner.CheckpointManager of its own"
            )
        self.optimizers = optimizers
        self.update_rule = "+".join(map(update_rule, optimizers))
        self.param_groups = [group for one in optimizers for group in one.param_groups]
        self.state = _States(optimizers)


class _States(MutableMapping[torch.Tensor, Any]):
    """State by parameter, written to the optimizer that trains it."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._of: dict[torch.Tensor, torch.optim.Optimizer] = {}
        for optimizer in optimizers:
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                if parameter in self._of:
                    raise ValueError(
                        f"a parameter of shape {list(parameter.shape)} is trained by two optimizers: save each with a "
                        "planner.CheckpointManager of its own"
                    )
                self._of[parameter] = optimizer

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        state = self._of[parameter].state
        if parameter not in state:  # which would make an empty one
            raise KeyError(parameter)
        return state[parameter]

    def __setitem__(self, parameter: torch.Tensor, value: Any) -> None:
        self._of[parameter].state[parameter] = value

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._of[parameter].state[parameter]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for optimizer in self._optimizers for parameter in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def clear(self) -> None:
        for optimizer in self._optimizers:
            optimizer.state.clear()
