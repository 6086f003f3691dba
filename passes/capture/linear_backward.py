"""Whether a backward is linear in the gradient it is handed.

Then, and only then, its result for a gradient of ones says everything about one that works element by element, and its
transpose is its gradient. A backward that clamps the gradient, or takes its sign, gives ones the same as one that does
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from passes.torch_compat.operators import tree_leaves

#: Functions of one tensor that are linear in it, by name without underscores.
_LINEAR = {"neg", "negative", "positive", "pos", "clone", "detach", "to", "type", "type_as", "float", "double", "half",
           "bfloat16", "contiguous", "get", "view", "view_as", "reshape", "reshape_as", "expand", "expand_as",
           "broadcast_to", "alias", "sum", "mean", "cumsum", "transpose", "swapaxes", "permute", "t", "movedim", "flip",
           "roll", "squeeze", "unsqueeze", "flatten", "unflatten", "select", "narrow", "index_select", "gather",
           "getitem", "take_along_dim", "tril", "triu", "split", "chunk", "unbind", "repeat", "repeat_interleave",
           "diagonal", "real", "imag", "view_as_real", "view_as_complex", "conj", "resolve_conj"}  # fmt: skip
#: Fourier transforms, of real and of complex numbers, by their names in torch.fft.
_LINEAR |= {f"fft_{one}fft{dims}" for one in ("", "i", "r", "ir", "h", "ih") for dims in ("", "2", "n")}
_LINEAR |= {"fft_fftshift", "fft_ifftshift"}
#: Linear in each operand; einsum has its operands behind an equation, each for itself or in a list.
_PRODUCTS = {"mul", "multiply", "rmul", "imul", "matmul", "rmatmul", "mm", "bmm", "mv", "outer", "ger", "dot", "vdot",
             "inner", "kron", "tensordot", "einsum"}  # fmt: skip
_QUOTIENTS = {"div", "divide", "true_divide", "truediv", "idiv", "itruediv"}
#: ``f(x, dim, index, y)``: x with y added or put somewhere.
_PLACED = {"scatter_add", "index_add", "scatter", "index_copy"}
#: ``f(gradient, output, …)``: derivatives that torch has as operators.
_DERIVATIVES = {"softmax_backward_data", "log_softmax_backward_data"}
_JOINED = {"cat", "concat", "stack"}
_SUMS = {"add", "sub", "subtract", "radd", "rsub", "iadd", "isub"}
#: Functions that look at the shape and dtype of a tensor, not at its elements.
_OF_SHAPE = {"ones_like", "zeros_like", "empty_like", "size", "dim", "numel", "is_floating_point", "is_complex",
             "full_like", "new_zeros", "new_ones", "new_full", "is_contiguous"}  # fmt: skip
_IN_PLACE = {"iadd", "isub", "imul", "idiv", "itruediv", "ipow", "iand", "ior", "ixor"}
_ZEROS = {"zeros_like", "new_zeros", "zeros"}


class OnlyLinear(TorchFunctionMode):
    """Follows gradients through the functions called inside the block.

    Attributes:
        broken_by: the first function that is not linear in what came of the gradient; None if all were.
    """

    def __init__(self, *gradients: torch.Tensor) -> None:
        super().__init__()
        self.broken_by: str | None = None
        # The tensors are held, so that their identities stay theirs.
        self._following: dict[int, torch.Tensor] = {id(gradient): gradient for gradient in gradients}
        self._zeros: dict[int, torch.Tensor] = {}

    def follows(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is linear in the gradient: made of it, or zero."""
        return id(tensor) in self._following or id(tensor) in self._zeros

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        follows = any(id(tensor) in self._following for tensor in _tensors((args, kwargs)))
        if follows and name not in _OF_SHAPE and not self._is_linear(name, args, kwargs):
            self.broken_by = self.broken_by or name
        result = func(*args, **kwargs)
        if args and _writes(func):
            self._zeros.pop(id(args[0]), None)
        for tensor in _tensors(result):
            if name in _ZEROS:
                self._zeros[id(tensor)] = tensor
            elif follows and name not in _OF_SHAPE:
                self._following[id(tensor)] = tensor
        return result

    def _is_linear(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        operands = (*args, *kwargs.values())
        following = [isinstance(operand, torch.Tensor) and id(operand) in self._following for operand in operands]
        if name in _LINEAR:
            return following[0]
        if name in _DERIVATIVES:
            return following[0] and sum(following) == 1
        if name in _PRODUCTS:
            return sum(id(tensor) in self._following for tensor in _tensors(operands)) == 1
        if name in _QUOTIENTS:
            return following[0] and sum(following) == 1 and "rounding_mode" not in kwargs
        if name in _SUMS:
            return all(map(self._is_linear_value, args[:2]))
        if name in _PLACED and len(operands) == 4:
            return self._is_linear_value(operands[0]) and self._is_linear_value(operands[3]) and not following[2]
        if name in _JOINED:
            return all(map(self._is_linear_value, args[0]))
        if name == "where":
            return not following[0] and len(args) == 3 and all(map(self._is_linear_value, args[1:]))
        if name in ("masked_fill", "setitem"):
            return following[0] and not any(following[1:]) and self._is_zero(operands[2])
        return False

    def _is_linear_value(self, value: Any) -> bool:
        return self._is_zero(value) or (isinstance(value, torch.Tensor) and id(value) in self._following)

    def _is_zero(self, value: Any) -> bool:
        return id(value) in self._zeros if isinstance(value, torch.Tensor) else value == 0


def _writes(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument in place."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name.strip("_") in ("setitem", *_IN_PLACE)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
