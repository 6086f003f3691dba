"""An optimizer on the host: its state is in the host's memory, weights and gradients stay on the device.

A step takes one parameter after the other: this rank's part of its gradient and weight come to the host, are updated
there by the optimizer's own code, and the weight goes back (Ren et al., "ZeRO-Offload", USENIX ATC 2021, without its
overlap). So the host holds the optimizer's state and one parameter more, however large the model is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from runtime.parameters.optimizer_steps import ELEMENTWISE
from runtime.parameters.sharded import SCALARS, ShardedParameter, local_of
from runtime.torch_compat.dtensors import local_part

#: State of a parameter of 16 bits: the float32 weight that the optimizer updates, as DTensor like the rest.
MASTER = "master_copy"
#: Parameters of up to so many bytes an element are too coarse to add small updates to.
_NARROW_BYTES = 2
#: What can run on the host; Adagrad makes its state at once, beside the parameters.
HOSTED = ELEMENTWISE - {torch.optim.Adagrad}


class OffloadedOptimizer(torch.optim.Optimizer):
    """``optimizer`` with its state in the host's memory.

    It is used as the optimizer it was made of: for ``zero_grad``, learning-rate schedules, ``state_dict``, checkpoints,
    ``replan``. Options are in ``param_groups``, state in ``state``: tensors there are DTensors of their parameter's
    placements whose memory is the host's. Parameters of 16 bits get a float32 copy among their state, which is what is
    updated; the weight on the device is that copy rounded. A weight that somebody else has changed is taken up.

    Args:
        optimizer: one of torch's that update each element for itself (AdamW, Adam, SGD, …), which has not stepped.

    Raises:
        ValueError: for any other optimizer, and for one with state.

    Example:
        >>> optimizer = planner.OffloadedOptimizer(torch.optim.AdamW(parallel.parameters(), lr=1e-3))
    """

    #: Parameters whose plan has optimizer state on the host refuse optimizers without this.
    keeps_state_on_host = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        _check(optimizer)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        #: The optimizer it was made of, which between updates has neither parameters nor state.
        self.updater = optimizer
        self.updater.param_groups = []
        #: Memory on the host that a device copies to at full speed, by use and dtype; None for parameters of a CPU.
        self._staging: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient; returns what ``closure`` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, ShardedParameter):
                    parameter.take_gradient()
                if local_of(parameter).grad is not None:
                    self._update(parameter, {name: value for name, value in group.items() if name != "params"})
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """As of any optimizer; state keeps its dtypes, where torch would give it those of the parameters."""
        super().load_state_dict(dict(state_dict))
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in state_dict["state"]:
                entry = state_dict["state"][number]
                self.state[parameter] = {
                    key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in entry.items()
                }

    def _update(self, parameter: torch.Tensor, options: dict[str, Any]) -> None:
        """One parameter's step on the host."""
        owner = local_of(parameter)
        entry = {key: _on_host(value) for key, value in self.state.get(parameter, {}).items()}
        weight = self._fetched("weight", owner)
        master = entry.pop(MASTER, None)
        narrow = owner.is_floating_point() and owner.itemsize <= _NARROW_BYTES
        if narrow:
            changed = master is None or not torch.equal(master.to(owner.dtype), weight)
            master = weight.float() if changed else master.float()
        leaf = nn.Parameter(master if narrow else weight)
        assert owner.grad is not None
        leaf.grad = self._fetched("gradient", owner.grad).to(leaf.dtype)
        updated = self._updated(leaf, entry, options)
        owner.copy_(leaf)
        if narrow:
            updated[MASTER] = leaf.detach()
        self.state[parameter] = {key: _shown(parameter, key, value) for key, value in updated.items()}

    def _updated(self, leaf: nn.Parameter, entry: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        """State of ``leaf`` after the optimizer's own step on it alone."""
        self.updater.param_groups = [{**options, "params": [leaf]}]
        self.updater.state = defaultdict(dict, {leaf: entry} if entry else {})
        try:
            self.updater.step()
            return dict(self.updater.state[leaf])
        finally:
            self.updater.param_groups, self.updater.state = [], defaultdict(dict)

    def _fetched(self, use: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host, valid until the next one for the same use."""
        if tensor.device.type == "cpu":
            return tensor.detach().clone(memory_format=torch.contiguous_format)
        staging = self._staging.get((use, tensor.dtype))
        if staging is None or staging.numel() < tensor.numel():
            staging = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            self._staging[use, tensor.dtype] = staging
        copied = staging[: tensor.numel()].view(tensor.shape)
        copied.copy_(tensor.detach())
        return copied


def update_rule(optimizer: torch.optim.Optimizer) -> str:
    """The name of what updates the parameters (``"AdamW"``), wherever its state is."""
    updater = optimizer.updater if isinstance(optimizer, OffloadedOptimizer) else optimizer
    return getattr(updater, "update_rule", type(updater).__name__)  # several together say theirs


def _check(optimizer: torch.optim.Optimizer) -> None:
    if type(optimizer) not in HOSTED:
        names = ", ".join(sorted({kind.__name__ for kind in HOSTED}))
        raise ValueError(
            f"a {type(optimizer).__name__} cannot run on the host: shards are updated there each by itself, which is "
            f"right for optimizers that work element by element: {names}"
        )
    if optimizer.state:
        raise ValueError("the optimizer has state already: make it anew, and load its state into OffloadedOptimizer")
    if any(group.get("capturable") or group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("an optimizer on the host is neither capturable nor differentiable: drop these options")


def _on_host(value: Any) -> Any:
    """State as plain tensors of the host; copied only if it is elsewhere."""
    local = local_part(value) if isinstance(value, DTensor) else value
    return local.cpu() if isinstance(local, torch.Tensor) else local


def _shown(parameter: torch.Tensor, key: str, value: Any) -> Any:
    """State as users and checkpoints see it."""
    if not isinstance(parameter, ShardedParameter) or not isinstance(value, torch.Tensor) or key in SCALARS:
        return value
    return parameter.placed(value)
