"""What runs and hangs on the autograd graph: its engine, the tensors that it saves, hooks on leaves."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from passes.torch_compat.engine_calls import in_backward
from passes.torch_compat.tensor_fields import gradient_hooks, saved_tensors_hooks_of_thread

__all__ = [
    "FollowedPass",
    "functions_keep_their_nodes",
    "gradient_hooks",
    "gradient_node",
    "has_saved_tensors_hooks",
    "in_backward",
    "keeps_graph",
    "saved_tensors_hooks_of_thread",
    "when_done",
    "will_run",
]

_SAVED_NAMES: dict[type, tuple[str, ...]] = {}


def when_done(function: Callable[[], Any]) -> None:
    """Call ``function`` at the end of the backward pass that this thread runs."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def gradient_node(leaf: torch.Tensor) -> Node:
    """The node that adds to the gradient of ``leaf``; it lasts as long as the result, or a graph that it is in."""
    return torch.autograd.graph.get_gradient_edge(leaf).node


def will_run(node: Node) -> bool:
    """Whether the backward pass that this thread runs comes to ``node``: not if it was asked for other tensors."""
    return bool(torch._C._will_engine_execute_node(node))


def keeps_graph() -> bool:
    """Whether the backward pass that this thread runs was told to retain the graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


class FollowedPass:
    """The backward pass that this thread runs, as long as it runs.

    A pass that raises calls nothing at its end: the engine drops it with all that was to be called.
    """

    def __init__(self) -> None:
        def held() -> None:
            """Nothing is to be done: who holds this is running."""

        when_done(held)
        self._held = weakref.ref(held)

    @property
    def is_running(self) -> bool:
        return self._held() is not None


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


@functools.cache
def functions_keep_their_nodes() -> bool:
    """Whether a held node of an ``autograd.Function`` can be run; in torch 2.11 the graph must be alive, too."""
    with torch.enable_grad():
        leaf = torch.ones((), device="cpu", requires_grad=True)
        node = _Twice.apply(leaf).grad_fn  # type: ignore[no-untyped-call]
    try:
        torch.autograd.grad([GradientEdge(node, 0)], [leaf], [torch.ones((), device="cpu")])
    except RuntimeError:
        return False
    return True


def has_saved_tensors_hooks(node: Node) -> bool:
    """Whether ``node`` holds a tensor behind ``saved_tensors_hooks``; True where torch does not tell."""
    return any(getattr(saved, "unpack_hook", True) is not None for saved in _saved_tensors(node))


def _saved_tensors(node: Node) -> Iterator[Any]:
    kind = type(node)
    if kind not in _SAVED_NAMES:
        _SAVED_NAMES[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    for name in _SAVED_NAMES[kind]:
        saved = getattr(node, name)
        yield from (one for one in (saved if isinstance(saved, (tuple, list)) else (saved,)) if one is not None)
