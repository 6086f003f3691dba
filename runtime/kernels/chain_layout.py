"""Where a launch of a chain's kernel finds its operands, and in which order it writes.

Results lie as torch's own operators would leave them: in the order in which the first whole operand lies in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from passes.chains.iteration_space import Fold, fold

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OperandLayout:
    """One launch's geometry.

    Attributes:
        space: the shape computed on.
        order: its dims as they are walked through, outermost first.
        sizes, strides: the folded space and each operand's strides in it.
        copies: operands are copied to lie in the order of their dims first.
    """

    space: Shape
    order: tuple[int, ...]
    sizes: Fold
    strides: tuple[Fold, ...]
    copies: bool

    @property
    def num_rows(self) -> int:
        return self.sizes[0] * self.sizes[1] * self.sizes[2]

    @property
    def width(self) -> int:
        return self.sizes[3]

    def restored(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor whose dims are in ``order`` (of size 1 where it has none) with the space's own order of dims."""
        return tensor if self.order == tuple(range(len(self.order))) else tensor.permute(self._places)

    @functools.cached_property
    def _places(self) -> tuple[int, ...]:
        """Where each dim of the space is in ``order``."""
        return tuple(sorted(range(len(self.order)), key=self.order.__getitem__))

    def sizes_in_order(self, spans_dim: Sequence[bool]) -> Shape:
        """The space's sizes in ``order``, 1 for dims that are not kept."""
        return tuple(self.space[dim] if spans_dim[dim] else 1 for dim in self.order)


def layout_of(tensors: Sequence[torch.Tensor], space: Shape, *, columns: int) -> OperandLayout | None:
    """The geometry for operands that broadcast to ``space``; None if no kernel can walk through them."""
    expanded = [tensor.expand(space) for tensor in tensors]
    order = _order(expanded, tensors, space, columns=columns)
    folded = _folded(expanded, space, order, columns=columns)
    if folded is not None:
        return OperandLayout(space, order, *folded, copies=False)
    order = tuple(range(len(space)))
    folded = _folded([tensor.contiguous().expand(space) for tensor in tensors], space, order, columns=columns)
    return None if folded is None else OperandLayout(space, order, *folded, copies=True)


def _folded(
    expanded: Sequence[torch.Tensor], space: Shape, order: Sequence[int], *, columns: int
) -> tuple[Fold, tuple[Fold, ...]] | None:
    strides = [[tensor.stride(dim) for dim in order] for tensor in expanded]
    return fold([space[dim] for dim in order], strides, columns=columns)


def _order(
    expanded: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], space: Shape, *, columns: int
) -> tuple[int, ...]:
    """Dims by the strides of the first operand that is not broadcast; rows stay rows, and columns columns."""
    dims = range(len(space))
    for tensor, tensor_as_passed in zip(expanded, tensors):
        if tensor_as_passed.shape == space and all(tensor_as_passed.stride(dim) for dim in dims if space[dim] > 1):
            split = len(space) - columns if columns else 0
            return (*_by_stride(tensor, dims[:split]), *_by_stride(tensor, dims[split:]))
    return tuple(dims)


def _by_stride(tensor: torch.Tensor, dims: Sequence[int]) -> list[int]:
    """Outermost first; dims of size 1 stay where they are."""
    strides = tensor.stride()
    real = iter(sorted((dim for dim in dims if tensor.shape[dim] > 1), key=lambda dim: strides[dim], reverse=True))
    return [next(real) if tensor.shape[dim] > 1 else dim for dim in dims]
