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
from torch.utils._device import DeviceContext

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
#: Devices that the operators are registered for.
_BACKENDS = ("CPU", "CUDA")
_num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # type: ignore[attr-defined]
_num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active


@functools.cache
def _plain_keys() -> frozenset[int]:
    """The dispatch keys of plain tensors with data, one set for each backend."""
    key = torch._C.DispatchKey
    kinds = []
    for backend in _BACKENDS:
        keys = torch._C.DispatchKeySet(key.ADInplaceOrView)
        for name in (backend, f"Autograd{backend}", f"Autocast{backend}"):
            keys = keys | torch._C.DispatchKeySet(getattr(key, name))
        kinds.append(keys.raw_repr())
    return frozenset(kinds)


def nobody_listens() -> bool:
    """Whether nothing on this thread looks at operators; to be asked before ``are_plain``."""
    return not (
        # Whatever else traces has a dispatch mode.
        is_dynamo_compiling()
        or _num_dispatch_modes()
        or (_num_function_modes() and not _functions_only_place())
        or _transforms()
    )


def _functions_only_place() -> bool:
    """Whether function modes do no more than say where tensors are made (``with torch.device``).

    Programs run in one on a GPU; operators of ours make tensors where their operands are.
    """
    modes = map(torch._C._get_function_stack_at, range(_num_function_modes()))  # type: ignore[attr-defined]
    return all(type(mode) is DeviceContext for mode in modes)


def are_plain(arguments: Sequence[Any]) -> bool:
    """Whether all tensors among the arguments are of torch's own class, with data, and such as kernels can read."""
    for argument in arguments:
        kind = type(argument)
        if kind in _TENSORS:
            # On a processor operators are torch's own, which know what kind of tensor they are given.
            if not argument.is_cpu and torch._C._dispatch_keys(argument).raw_repr() not in _plain_keys():
                return False
        elif isinstance(argument, torch.Tensor):
            return False
    return True


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without what that does for functorch's transforms, which takes half of its time."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply
