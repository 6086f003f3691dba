"""The planned modules of a module that is not planned itself, with whole weights under the names of all of it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from planner.integrations.together import ModulesTogether
from runtime.checkpoint import load_optimizer, whole_optimizer_state
from runtime.module.parallel_module import ParallelModule
from runtime.parameters.adoption import hand_over

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class PlannedParts:
    """Attributes of a module that are parallel modules; all ranks must call its methods together.

    Args:
        names: of the attributes; None for all modules that have parameters.
    """

    def __init__(self, names: tuple[str, ...] | None) -> None:
        self._chosen = names
        self._parts: dict[str, ParallelModule] = {}
        #: The parameters that each part was made from, for as long as something else holds them: an optimizer.
        self._originals: dict[str, dict[str, weakref.ref[torch.Tensor]]] = {}

    def plan(self, module: nn.Module, planned: Callable[[nn.Module], ParallelModule]) -> None:
        """Put a parallel module in the place of each part that is none yet.

        Raises:
            ValueError: if there is nothing to plan, and for parameters outside of the parts.
        """
        children = dict(module.named_children())
        names = self._chosen
        if names is None:
            names = tuple(name for name, child in children.items() if any(True for _ in child.parameters()))
        unknown = [name for name in names if name not in children]
        if unknown or not names:
            raise ValueError(
                f"{type(module).__name__} has no module {unknown[0]!r}: it has {', '.join(children) or 'none'}"
                if unknown
                else f"{type(module).__name__} has no module with parameters to plan"
            )
        outside = [name for name, _ in module.named_parameters() if name.partition(".")[0] not in names]
        if outside:
            raise ValueError(
                f"parameter {outside[0]!r} of {type(module).__name__} is in none of the planned modules "
                f"({', '.join(names)}): move it into one, or name its module in modules="
            )
        for name in names:
            child = children[name]
            if isinstance(child, _CONTAINERS):
                raise ValueError(
                    f"{name!r} is a {type(child).__name__}, which is not called as a whole: put its modules and the "
                    "code that calls them into one module"
                )
            parallel = child if isinstance(child, ParallelModule) else planned(child)
            if parallel is not child:
                self._originals[name] = {path: weakref.ref(one) for path, one in child.named_parameters()}
                parallel.count_as_trained()
                parallel.register_forward_pre_hook(_plan_for_training, with_kwargs=True)
                setattr(module, name, parallel)
            self._parts[name] = parallel

    def hand_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer over the parameters that a part was made from train the part."""
        for name, part in self._parts.items():
            alive = {path: one() for path, one in self._originals.get(name, {}).items()}
            hand_over(optimizer, {path: one for path, one in alive.items() if one is not None}, part)

    def wait_for_ranks(self) -> None:
        """Wait for all ranks; meanwhile join in what one of them calls alone of a part (a save, say)."""
        for parallel in self._parts.values():
            parallel.wait_for_ranks()

    def full_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The original's state dict, with whole tensors, on every rank."""
        whole = {f"{part}.{name}": tensor for part, parallel in self._parts.items()
                 for name, tensor in parallel.full_state_dict().items()}  # fmt: skip
        own = {name: value for name, value in module.state_dict().items() if name.partition(".")[0] not in self._parts}
        return own | whole  # of a part that is a pipeline's, a rank's own state dict has a stage alone

    def load_full_state_dict(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Take a state dict of the original.

        Raises:
            ValueError: as ``ParallelModule.load_full_state_dict``.
            RuntimeError: as ``torch.nn.Module.load_state_dict``.
        """
        others = dict(state)
        for part, parallel in self._parts.items():
            own = {name: others.pop(name) for name in list(others) if name.startswith(f"{part}.")}
            parallel.load_full_state_dict({name[len(part) + 1 :]: value for name, value in own.items()}, strict=strict)
        missing, unexpected = module.load_state_dict(others, strict=False)
        missing = [name for name in missing if name.partition(".")[0] not in self._parts]
        if strict and (missing or unexpected):
            raise RuntimeError(f"state dict of {type(module).__name__}: missing {missing}, unexpected {unexpected}")

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """As ``runtime.checkpoint.load_optimizer``, for an optimizer over parameters of any of the parts."""
        load_optimizer(ModulesTogether(self._parts_of(optimizer)), optimizer, state)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """As ``runtime.checkpoint.whole_optimizer_state``."""
        return whole_optimizer_state(ModulesTogether(self._parts_of(optimizer)), optimizer)

    def clip_grad_norm_(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        """Clip by the norm of all gradients of an optimizer's parts, also where each rank has those of a stage.

        Raises:
            ValueError: if the optimizer has not all parameters of a part that are trained.
        """
        parts = self._parts_of(optimizer)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, part in parts.items():
            if any(one.requires_grad and id(one) not in held for one in part.parameters()):
                raise ValueError(
                    f"the optimizer has some parameters of {name!r} only: with a pipeline gradients are clipped by the "
                    "norm of a whole module, so give it all of them, or clip in none"
                )
        norms = [part.clip_grad_norm_(math.inf) for part in parts.values()]
        scale = float((max_norm / (torch.stack(norms).square().sum().sqrt() + 1e-6)).clamp(max=1.0))
        for part in parts.values():
            for parameter in part.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)

    def _parts_of(self, optimizer: torch.optim.Optimizer) -> dict[str, ParallelModule]:
        """Those of which an optimizer has parameters."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return {name: part for name, part in self._parts.items() if any(id(own) in held for own in part.parameters())}


def _plan_for_training(parallel: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before the first call, which may be one of an evaluation: let it be planned as one of training."""
    assert isinstance(parallel, ParallelModule)
    if parallel.is_planned:
        return
    modes = [(module, module.training) for module in parallel.modules()]
    parallel.train()
    try:
        with torch.enable_grad():
            parallel.plan_for(*args, **kwargs)
    finally:
        for module, mode in modes:
            module.training = mode
