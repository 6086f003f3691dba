"""``torch.vmap`` in a model: as the operators that it calls on the whole batch.

A tracer would see what one sample's function calls. So the function is traced on its own first, with all batch dims in
place, and its operators are called in the trace of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from passes.capture.watch import WatchedForward
from passes.ir.errors import CaptureError
from passes.torch_compat.operators import tree_flatten, tree_unflatten
from passes.torch_compat.transforms import intercepted_vmap, operators_of


def traced_batched_calls() -> AbstractContextManager[None]:
    """Inside the block, models may call functions that ``torch.vmap`` made."""
    return intercepted_vmap(_traced_call)


def _traced_call(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, structure = tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def function(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors):
            filled[place] = tensor
        own_args, own_kwargs = tree_unflatten(filled, structure)
        with _SameGradients():
            return original(*own_args, **own_kwargs)

    tensors = [leaves[place] for place in places]
    return fx.Interpreter(operators_of(function, tensors, watched_by=WatchedForward)).run(*tensors)


class _SameGradients(TorchFunctionMode):
    """Refuses what a list of operators does not tell: where gradients are off."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("_set_grad_enabled", "requires_grad_"):
            raise CaptureError(
                "torch.no_grad and torch.func.grad inside of a function for torch.vmap cannot be traced: detach its "
                "result, or put torch.no_grad around the call"
            )
        return func(*args, **(kwargs or {}))
