"""Whether an operator of ours may run at once, without torch's dispatcher, whose way through Python costs 0.1 ms.

The dispatcher is needed by whoever listens to it or changes what operators mean: compilers and tracers, dispatch and
function modes (``LocalTensorMode``, fake tensors, counters, selective checkpoints, ``spmd_types``' checker), transforms
of functorch, tensors of other classes, without data, in other layouts or with lazy bits. On plain tensors, with nobody
listening, all that it would do is call the implementation under an autograd node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from runtime.torch_compat.dispatcher import (
    DeviceContext,
    are_transforms_active,
    dispatch_keys,
    function_mode_at,
    num_dispatch_modes,
    num_function_modes,
    plain_key_sets,
)

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
#: Devices that the operators are registered for.
_BACKENDS = ("CPU", "CUDA")


@functools.cache
def _plain_keys() -> frozenset[int]:
    return plain_key_sets(_BACKENDS)


def nobody_listens() -> bool:
    """Whether nothing on this thread observes operators; check this before ``are_plain``."""
    return not (
        # Other tracers have a dispatch mode.
        is_dynamo_compiling()
        or num_dispatch_modes()
        or (num_function_modes() and not _functions_only_place())
        or are_transforms_active()
    )


def _functions_only_place() -> bool:
    """Whether function modes do no more than say where tensors are made (``with torch.device``).

    Programs run in one on a GPU; operators of ours make tensors where their operands are.
    """
    return all(type(mode) is DeviceContext for mode in map(function_mode_at, range(num_function_modes())))


def are_plain(arguments: Sequence[Any]) -> bool:
    """Whether all tensors among the arguments are of torch's own class, with data, and such as kernels can read."""
    for argument in arguments:
        kind = type(argument)
        if kind in _TENSORS:
            # On a processor operators are torch's own, which know what kind of tensor they are given.
            if not argument.is_cpu and dispatch_keys(argument).raw_repr() not in _plain_keys():
                return False
        elif isinstance(argument, torch.Tensor):
            return False
    return True


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without what that does for functorch's transforms, which takes half of its time."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply
