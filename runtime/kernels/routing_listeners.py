"""Who is told which experts tokens are routed to; nobody by default, which costs nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from runtime.torch_compat.autograd_engine import in_backward

#: Takes the ids of experts [..., k] of one rank's tokens, and how many experts there are on all ranks.
RoutingListener = Callable[[torch.Tensor, int], None]

_listeners: list[RoutingListener] = []
#: The same of linear layers of experts, of which a mixture may have several.
_layer_listeners: list[RoutingListener] = []


def note_routing(expert_ids: torch.Tensor, num_experts: int) -> None:
    """Tell the listeners; what is computed again in a backward pass was told before."""
    if _listeners and not in_backward():
        for listener in _listeners:
            listener(expert_ids, num_experts)


def note_layer_routing(expert_ids: torch.Tensor, num_experts: int) -> None:
    """The same of one linear layer of experts."""
    if _layer_listeners and not in_backward():
        for listener in _layer_listeners:
            listener(expert_ids, num_experts)


@contextlib.contextmanager
def listening_to_layers(listener: RoutingListener) -> Iterator[None]:
    """A context in which every linear layer of experts tells ``listener``."""
    _layer_listeners.append(listener)
    try:
        yield
    finally:
        _layer_listeners.remove(listener)


@contextlib.contextmanager
def listening(listener: RoutingListener) -> Iterator[None]:
    """A context in which every operator of experts tells ``listener``."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """A context in which nobody is told: what is routed here is routed again, and counted then."""
    listeners, _listeners[:] = list(_listeners), ()
    of_layers, _layer_listeners[:] = list(_layer_listeners), ()
    try:
        yield
    finally:
        _listeners[:], _layer_listeners[:] = listeners, of_layers
