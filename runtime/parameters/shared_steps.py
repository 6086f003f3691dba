"""Steps of optimizers that all ranks of a model take or skip together.

Each rank has parts of the parameters, and with a pipeline those of its own stage alone, maybe none. A gradient scaler
(``torch.amp.GradScaler``) that finds a number in one part that is not finite must tell all ranks, or some step on:
DTensor tells those of a stage, and only where the first of the gradients is cut. And torch makes no optimizer of no
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn

from runtime.parameters.sharded import AllRanks, ShardedParameter
from runtime.torch_compat.amp_and_optimizers import Flags, accept_optimizers_of_nothing, share_flags_of_scalers

#: Of every model of several ranks: all of them, and whether a pipeline cuts it.
_models: WeakKeyDictionary[nn.Module, tuple[AllRanks, bool]] = WeakKeyDictionary()


def step_together(model: nn.Module, ranks: AllRanks | None, *, of_stage: bool) -> None:
    """Have optimizers of the parameters of a parallel module step or skip alike on all of its ranks.

    Args:
        ranks: those that train it now; None for one alone.
        of_stage: whether ranks of other pipeline stages have other parameters.
    """
    if ranks is None:
        _models.pop(model, None)
        return
    _models[model] = ranks, of_stage
    share_flags_of_scalers(_shared)
    accept_optimizers_of_nothing(_has_pipeline)


def _has_pipeline() -> bool:
    return any(of_stage for _, of_stage in _models.values())


def _shared(optimizer: torch.optim.Optimizer, flags: Flags, device: torch.device) -> Flags:
    """What any rank found, on every rank."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for ranks in _ranks_of(parameters):
        found = torch.stack([flag.to(device) for flag in flags.values()] or [torch.zeros((), device=device)]).amax(0)
        ranks.wait(ranks.all_reduce(found, "max"))
        flags = {each: found.to(each) for each in flags or (device,)}
    return flags


def _ranks_of(parameters: Sequence[torch.Tensor]) -> list[AllRanks]:
    """The ranks of the models that ``parameters`` are of; where a stage has none, of those that pipelines cut."""
    own = [parameter.ranks for parameter in parameters if isinstance(parameter, ShardedParameter)]
    if not parameters:
        own = [ranks for ranks, of_stage in _models.values() if of_stage]
    by_name = {ranks.name: ranks for ranks in own if ranks is not None}
    return [by_name[name] for name in sorted(by_name)]
