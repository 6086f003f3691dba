"""How many processes there are, as scripts use it: for sizes of batches, but never for values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: Operators that scale values, by the names that torch calls them.
_SCALING = frozenset({"mul", "mul_", "multiply", "multiply_", "div", "div_", "divide", "divide_", "true_divide"})


class ProcessCount(int):
    """A number that tensors cannot be multiplied with, or divided by.

    Under DDP a process has its own part of a batch, so scripts undo averages over processes by that factor. Here each
    has the whole batch, the loss of which is that of one process: such a factor would be wrong without a sign of it.
    """

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__name__", "") in _SCALING:
            raise ValueError(
                "a tensor is multiplied with, or divided by, accelerator.num_processes: every process has the whole "
                "batch, and losses, counts and what gather and reduce return are those of all processes already; leave "
                "the factor out"
            )
        return function(*_plain(args), **{name: _plain(value) for name, value in (kwargs or {}).items()})


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return int(value) if isinstance(value, ProcessCount) else value
