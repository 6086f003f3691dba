"""What ``torch.amp.GradScaler`` and ``torch.optim.Optimizer`` take to be on one device, though ranks share a model.

Both are replaced for the whole process, and for good, by what does the same for models of one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

#: By device, whether some gradient there is not finite: a float of 0 or 1.
Flags = dict[torch.device, torch.Tensor]


@functools.cache
def share_flags_of_scalers(share: Callable[[Optimizer, Flags, torch.device], Flags]) -> None:
    """What a scaler finds in an optimizer's gradients is what ``share`` makes of it; torch asks no other rank."""
    original = GradScaler._unscale_grads_

    @functools.wraps(original)
    def unscale(scaler: GradScaler, optimizer: Optimizer, inv_scale: Any, found_inf: Any, *args: Any) -> Flags:
        flags: Flags = original(scaler, optimizer, inv_scale, found_inf, *args)
        return share(optimizer, flags, found_inf.device)

    GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign, assignment]


@functools.cache
def accept_optimizers_of_nothing(accepts: Callable[[], bool]) -> None:
    """An optimizer may be made of an empty list of parameters where ``accepts``; torch refuses it."""
    original = Optimizer.__init__

    @functools.wraps(original)
    def init(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        if not isinstance(params, (torch.Tensor, dict)):
            params = list(params)
            if not params and accepts():
                params = [{"params": []}]
        original(self, params, defaults)

    Optimizer.__init__ = init  # type: ignore[method-assign]
