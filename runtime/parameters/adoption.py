"""Taking over an optimizer that was made for the model before it was compiled, as training scripts usually do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from runtime.parameters.sharded import SCALARS, ShardedParameter
from runtime.state.owned import Owned


class Adopting(Protocol):
    """A parallel module."""

    def named_parameters(self, *, remove_duplicate: bool) -> Iterator[tuple[str, torch.Tensor]]: ...

    def owned(self) -> tuple[Owned, ...]: ...


def adopt(
    optimizer: torch.optim.Optimizer,
    originals: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    owned: tuple[Owned, ...],
) -> None:
    """Let an optimizer over the parameters of a model train the parallel module that was made from it.

    Its groups get the parallel module's parameters, and their state is cut as they are. Parameters that this rank has
    nothing of (of other pipeline stages) leave their groups.

    Args:
        originals: the model's parameters by name.
        parameters: the parallel module's, by every name.

    Raises:
        ValueError: if the optimizer holds no parameter of the model, or state that is neither shaped as its parameter
            nor a scalar.
    """
    names = {id(parameter): name for name, parameter in originals.items()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in names for parameter in held):
        raise ValueError(
            "optimizer= takes an optimizer over the parameters of the model that is compiled, or the name of one to "
            f"plan for; this {type(optimizer).__name__} holds none of them"
        )
    pieces = {name: piece for piece in owned for name in (piece.name, *piece.aliases)}
    states: dict[torch.Tensor, Any] = {}
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None:
            states[parameter] = state
        elif name in parameters:
            states[parameters[name]] = _cut(state, parameter, parameters[name], pieces[name])
    for group in optimizer.param_groups:
        group["params"] = [
            parameters[names[id(parameter)]] if id(parameter) in names else parameter
            for parameter in group["params"]
            if names.get(id(parameter)) in parameters or id(parameter) not in names
        ]
    optimizer.state.clear()
    optimizer.state.update(states)


def hand_over(optimizer: torch.optim.Optimizer, originals: Mapping[str, torch.Tensor], parallel: Adopting) -> None:
    """Let ``optimizer`` train ``parallel``, if it holds any parameter of the model that this was made from."""
    identities = {id(parameter) for parameter in originals.values()}
    if any(id(parameter) in identities for group in optimizer.param_groups for parameter in group["params"]):
        adopt(optimizer, originals, dict(parallel.named_parameters(remove_duplicate=False)), parallel.owned())


def _cut(state: Mapping[str, Any], original: torch.Tensor, parameter: torch.Tensor, piece: Owned) -> dict[str, Any]:
    return {key: _cut_value(key, value, original, parameter, piece) for key, value in state.items()}


def _cut_value(key: str, value: Any, original: torch.Tensor, parameter: torch.Tensor, piece: Owned) -> Any:
    if not isinstance(value, torch.Tensor) or key in SCALARS:
        return value
    if value.shape != original.shape:
        raise ValueError(
            f"the optimizer keeps {key!r} of shape {list(value.shape)} for {piece.name!r} of shape "
            f"{list(original.shape)}, which cannot be cut as the plan cuts the parameter: hand planner.compile an "
            "optimizer that has not stepped yet"
        )
    local = value
    for dim, (offset, size) in enumerate(zip(piece.offsets, piece.tensor.shape)):
        local = local.narrow(dim, offset, size)
    local = local.detach().to(piece.tensor.device, copy=True, memory_format=torch.contiguous_format)
    return parameter.placed(local) if isinstance(parameter, ShardedParameter) else local
