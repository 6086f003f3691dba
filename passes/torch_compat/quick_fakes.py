"""Stand-ins' results looked up with fewer calls of Python: a quarter of a trace asks what torch has computed before.

What is looked up is what torch tells calls apart by; ``memory_format`` is left out, which follows from sizes and
strides. Symbols, sparse tensors and whatever else is rare are left to torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

#: Types of arguments that stand for themselves in a key, beside their type: 1 and 1.0 are equal.
_PLAIN = frozenset(
    (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


@contextlib.contextmanager
def quick_fakes() -> Iterator[None]:
    """Inside the block, what an operator gives for stand-ins is looked up quicker."""
    before = FakeTensorMode._prep_args_for_hash

    def add_arguments(self: FakeTensorMode, key: list[Any], args: Any, *state: Any) -> None:
        kind = type(args)
        if kind is dict:
            key += (kind, tuple(args))
            args = args.values()
        elif kind is tuple or kind is list:
            key += (kind, len(args))
        else:
            return before(self, key, args, *state)
        for arg in args:
            kind = type(arg)
            if kind in _PLAIN:
                key += (kind, arg)
            elif kind is FakeTensor and _is_usual(arg, self):
                key.append(_described(arg))
            elif kind is tuple or kind is list or kind is dict:
                add_arguments(self, key, arg, *state)
            else:
                before(self, key, iter((arg,)), *state)
        return None

    FakeTensorMode._prep_args_for_hash = add_arguments  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        FakeTensorMode._prep_args_for_hash = before  # type: ignore[method-assign]


def _is_usual(tensor: FakeTensor, mode: FakeTensorMode) -> bool:
    """Whether it is a dense stand-in of ``mode`` whose sizes are numbers and whose values nobody knows."""
    return (
        tensor.fake_mode is mode
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not tensor._has_symbolic_sizes_strides
    )


def _described(tensor: FakeTensor) -> tuple[Any, ...]:
    return (
        *(tensor.dtype, tensor.shape, tensor.stride(), tensor.fake_device, tensor.storage_offset()),
        *(tensor.untyped_storage().nbytes(), tensor.requires_grad, tensor.is_inference()),
        *(tensor.is_conj(), tensor.is_neg(), tensor.is_quantized),
    )
