"""What modules keep in state dicts beside tensors: ``get_extra_state`` and ``set_extra_state``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

_NAME = "_extra_state"


def extra_states(model: nn.Module, names: Collection[str] | None = None) -> dict[str, Any]:
    """The extra state of each module that has any, by name in a state dict; ``names``: of those wanted (None: all)."""
    everything = model.state_dict()
    return {
        name: value
        for name, value in everything.items()
        if not isinstance(value, torch.Tensor) and (names is None or name in names)
    }


def take_extra_states(
    model: nn.Module, state: Mapping[str, Any], *, share: Callable[[list[Any]], None] | None = None
) -> Mapping[str, Any]:
    """Hand extra state to the modules that it is of; the rest of ``state``.

    Args:
        share: puts the first rank's objects in the place of a rank's own; None: each rank's own count.
    """
    own = extra_states(model)
    if not own:
        return state
    objects = [{name: state[name] for name in own if name in state}]
    if share is not None:
        share(objects)
    for name, value in objects[0].items():
        model.get_submodule(name.removesuffix(_NAME).rstrip(".")).set_extra_state(value)
    return {name: value for name, value in state.items() if name not in own}
