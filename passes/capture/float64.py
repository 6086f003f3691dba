"""Compare in float64 for real: models that cast to float32 "for precision" would round in the middle otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from passes.torch_compat.grouped_products import grouped_products
from passes.torch_compat.operators import tree_leaves, tree_map
from passes.torch_compat.tensor_fields import FakeTensor

_CASTS = ("to", "float", "type", "type_as")
#: Functions that read another dtype out of the same bytes.
_OF_BITS = ("view", "frombuffer")
#: How torch itself makes the stand-in of a tensor that there is already, which tracing asserts to be of its dtype.
_STAND_INS = ("empty_strided",)
#: Products that torch has in narrower floats alone.
_GROUPED = ("grouped_mm", "_grouped_mm")
#: Functions that take the dtype to compute in.
_WITH_DTYPE = ("softmax", "log_softmax", "sum", "mean", "cumsum", "prod")
#: Functions that take floats of one dtype alone, where others promote: a model that casts both would have cast both.
_OF_ONE_DTYPE = frozenset({
    "__matmul__", "__rmatmul__", "matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "outer", "einsum", "tensordot",
    "linear", "addmm", "addmv", "addbmm", "baddbmm", "scaled_dot_product_attention",
})  # fmt: skip


class keep_float64(TorchFunctionMode):
    """Inside the block, a float64 tensor stays float64 where the model asks for a narrower float.

    For verification alone: run the reference and the capture inside it. Hugging Face models cast logits, norms and
    softmax to float32, which rounds a float64 model at 1e-7 in places that depend on the order of summation. Grouped
    products, which torch lacks in float64, are computed one after the other.

    Args:
        new_too: floats that the model makes, of a size or of whole numbers, are float64 as well, whatever dtype it
            asks for. (Those of positions, say, are else rounded at 1e-7, other elements of a vector otherwise.)
    """

    def __init__(self, *, new_too: bool = False) -> None:
        super().__init__()
        self._new_too = new_too
        self._defaults: list[torch.dtype] = []

    def __enter__(self) -> keep_float64:
        self._defaults.append(torch.get_default_dtype())
        if self._new_too:
            torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._defaults.pop())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        source = args[0].dtype if args and isinstance(args[0], torch.Tensor) else None
        wide = source == torch.float64
        if wide and name in _CASTS:
            return self._cast(func, name, args, kwargs)
        if wide and name in _GROUPED and _is_plain(args, kwargs):
            is_traced = args[0].is_meta or isinstance(kwargs["offs"], FakeTensor)
            function: Any = torch.ops.meshwright.grouped_products if is_traced else grouped_products
            return function(*args, kwargs["offs"])
        if self._new_too and (source is None or not (source.is_floating_point or source.is_complex)):
            return self._made(func, name, args, kwargs)
        if wide and name in _WITH_DTYPE:
            args, kwargs = tuple(map(_widest, args)), {key: _widest(entry) for key, entry in kwargs.items()}
        if name in _OF_ONE_DTYPE and any(map(_is_wide, tree_leaves((args, kwargs)))):
            args, kwargs = tree_map(_wide, (args, kwargs))
        return func(*args, **kwargs)

    @staticmethod
    def _made(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A result made of no floats."""
        if name == "float":
            return args[0].double()
        if name in _OF_BITS or (name in _STAND_INS and str(kwargs.get("device")) == "meta"):
            return func(*args, **kwargs)
        if name in _CASTS:
            args = tuple(_widest(entry) for entry in args)
        return func(*args, **{key: _widest(entry) if key == "dtype" else entry for key, entry in kwargs.items()})

    @staticmethod
    def _cast(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "float":
            return args[0]
        if name == "type_as":
            return args[0] if args[1].dtype.is_floating_point else func(*args, **kwargs)
        other = args[1] if len(args) > 1 else None
        if name == "to" and isinstance(other, torch.Tensor) and _narrow(other.dtype):
            return args[0]
        return func(*map(_widest, args), **{key: _widest(entry) for key, entry in kwargs.items()})


def _wide(entry: Any) -> Any:
    return entry.double() if isinstance(entry, torch.Tensor) and _narrow(entry.dtype) else entry


def _is_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a grouped product is of sorted rows and a matrix for each group, and of no bias."""
    is_of_rows = len(args) == 2 and [operand.ndim for operand in args] == [2, 3]
    return is_of_rows and kwargs.get("offs") is not None and kwargs.get("bias") is None


def _widest(entry: Any) -> Any:
    return torch.float64 if _narrow(entry) else entry


def _is_wide(entry: Any) -> bool:
    return isinstance(entry, torch.Tensor) and entry.dtype == torch.float64


def _narrow(entry: Any) -> bool:
    return isinstance(entry, torch.dtype) and entry.is_floating_point and entry != torch.float64
