"""Matrix products whose rows a mesh axis cuts before or after them: exchanged in pieces, while others are multiplied.

``gathered_linear`` multiplies the rows of all ranks with this rank's features (``gathered_linears`` with those of
several layers), ``scattered_linear`` sums products of all ranks' parts of the contracted dim and keeps this rank's
rows. While one piece is on its way another is multiplied (Wang et al., "Overlap communication with dependent
computation via decomposition in large deep learning models", 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from spmd_types import R, S, V

from passes.rules.rule import pieces_of_rows
from runtime.kernels.type_rules import product_type
from runtime.ops.mesh_types import groups_of
from runtime.torch_compat.process_groups import all_gather_along, reduce_scatter_along
from runtime.torch_compat.process_groups import functional_collectives as funcol

_ROWS = -2
#: Place of the first weight among the arguments of ``_GatheredLinears``.
_FIRST = 3


def gathered_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, axis: str
) -> torch.Tensor:
    """``F.linear`` of the rows of all ranks of ``axis``.

    Args:
        x: this rank's rows, [..., rows / ranks, in]: S(-2).
        weight, bias: this rank's features, [out / ranks, in] and [out / ranks].

    Returns:
        [..., rows, out / ranks]: S(-1). Backward the rows are gathered once more, for the weight's gradient.
    """
    (result,) = gathered_linears(x, [weight], biases=[bias], axis=axis)
    return result


def gathered_linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    *,
    biases: Sequence[torch.Tensor | None] | None = None,
    axis: str,
) -> tuple[torch.Tensor, ...]:
    """``gathered_linear`` of each weight (and bias): the rows are gathered once for all of them.

    Backward they are gathered once more, for the gradients of all weights, and the sum of the gradients that all layers
    have for ``x`` is scattered once.
    """
    (group,) = groups_of((axis,))
    results: tuple[torch.Tensor, ...] = _GatheredLinears.apply(
        x, group, len(weights), *weights, *(biases or [None] * len(weights))
    )
    return results


def scattered_linear(x: torch.Tensor, weight: torch.Tensor, *, axis: str) -> torch.Tensor:
    """``F.linear`` summed over the ranks of ``axis``, of which each keeps its rows.

    Args:
        x: this rank's part of what is contracted, [..., rows, in / ranks]: S(-1).
        weight: [out, in / ranks].

    Returns:
        [..., rows / ranks, out]: S(-2).
    """
    (group,) = groups_of((axis,))
    result: torch.Tensor = _ScatteredLinear.apply(x, weight, group)
    return result


class _GatheredLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, count: int, *parameters: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.count = group, count
        ctx.set_materialize_grads(False)
        products = [_RowsInOrder(_all_rows(x, group)) for _ in weights]
        for rows in _gathered(x, group):
            for product, weight, bias in zip(products, weights, biases):
                product.add(F.linear(rows, weight, bias))  # type: ignore[arg-type]
        return tuple(product.whole() for product in products)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        _check_first_derivative()
        x, *weights = ctx.saved_tensors
        by_weight: list[torch.Tensor | None] = [None] * ctx.count
        needs = ctx.needs_input_grad
        asked = [grad is not None and needed for grad, needed in zip(grads, needs[_FIRST:])]
        there = [(grad, weight) for grad, weight in zip(grads, weights) if grad is not None]
        # sent before the gradient's pieces, needed after them
        sent = all_gather_along(x.contiguous().unsqueeze(0), 0, ctx.group) if any(asked) else None
        by_x = _scattered(there, ctx.group, transposed=True) if needs[0] and there else None
        if sent is not None:
            rows = funcol.wait_tensor(sent)
            by_weight = [
                _by_weight(_of_ranks(grad, ctx.group), rows) if grad is not None and is_asked else None
                for grad, is_asked in zip(grads, asked)
            ]
        by_bias = [
            grad.flatten(0, _ROWS).sum(0) if grad is not None and needed else None
            for grad, needed in zip(grads, needs[_FIRST + ctx.count :])
        ]
        return by_x, None, None, *by_weight, *by_bias

    @staticmethod
    def spmd_typecheck(
        *, x: torch.Tensor, group: dist.ProcessGroup, count: int, parameters: tuple[torch.Tensor | None, ...]
    ) -> Any:
        rows: Any = spmd.rules.all_gather(x, group, src=S(x.dim() + _ROWS), dst=R)
        layers: Any = zip(parameters[:count], parameters[count:])
        return tuple(
            product_type("...h,vh->...v", rows, weight)
            if bias is None
            else product_type("...h,vh,v->...v", rows, weight, bias)
            for weight, bias in layers
        )


class _ScatteredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return _scattered([(x, weight)], group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        _check_first_derivative()
        x, weight = ctx.saved_tensors
        by_x = by_weight = None
        pieces: list[torch.Tensor] = []
        gathered = _listed(_gathered(grad, ctx.group), pieces)
        if ctx.needs_input_grad[0]:
            products = _RowsInOrder(x.shape[_ROWS])
            for rows in gathered:
                products.add(F.linear(rows, weight.t()))
            by_x = products.whole()
        if ctx.needs_input_grad[1]:
            by_weight = _by_weight(torch.cat([*pieces, *gathered], dim=_ROWS), _of_ranks(x, ctx.group))
        return by_x, by_weight, None

    @staticmethod
    def spmd_typecheck(*, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> Any:
        sums = product_type("...h,vh->...v", x, weight)
        return spmd.rules.reduce_scatter(sums, group, src=V, dst=S(x.dim() + _ROWS))


def _gathered(shard: torch.Tensor, group: dist.ProcessGroup) -> Iterator[torch.Tensor]:
    """The rows of all ranks, [ranks, ..., rows / ranks / pieces, width], a piece at a time; all are sent at once."""
    pieces = shard.chunk(pieces_of_rows(shard.shape[_ROWS]), dim=_ROWS)
    sent = [all_gather_along(piece.contiguous().unsqueeze(0), 0, group) for piece in pieces]
    for piece in sent:
        yield funcol.wait_tensor(piece)


def _scattered(
    operands: Sequence[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup, *, transposed: bool = False
) -> torch.Tensor:
    """This rank's rows of the sum over all ranks, and over ``operands`` (x, weight), of ``F.linear(x, weight)``; each
    piece is sent once it is there."""
    rows = [_of_ranks(x, group) for x, _ in operands]
    weights = [weight.t() if transposed else weight for _, weight in operands]
    pieces = zip(*(each.chunk(pieces_of_rows(each.shape[_ROWS]), dim=_ROWS) for each in rows))
    sent = [reduce_scatter_along(_sum_of_products(piece, weights), "sum", 0, group) for piece in pieces]
    return torch.cat([funcol.wait_tensor(piece).squeeze(0) for piece in sent], dim=_ROWS)


def _sum_of_products(rows: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of ``F.linear(rows, weight)``, each added where it lies."""
    result = F.linear(rows[0], weights[0])
    for each, weight in zip(rows[1:], weights[1:]):
        result.flatten(0, _ROWS).addmm_(each.flatten(0, _ROWS), weight.t())
    return result


def _all_rows(shard: torch.Tensor, group: dist.ProcessGroup) -> int:
    return shard.shape[_ROWS] * dist.get_world_size(group)


def _of_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[..., rows, width] as [ranks, ..., rows / ranks, width]."""
    return x.unflatten(_ROWS, (dist.get_world_size(group), -1)).movedim(_ROWS - 1, 0)


class _RowsInOrder:
    """Pieces [ranks, ..., rows / ranks / pieces, width] put together as one tensor [..., rows, width]."""

    def __init__(self, rows: int) -> None:
        self.rows, self.first = rows, 0
        self.tensor: torch.Tensor | None = None

    def add(self, piece: torch.Tensor) -> None:
        count = piece.shape[_ROWS]
        if self.tensor is None:
            self.tensor = piece.new_empty(*piece.shape[1:_ROWS], len(piece), self.rows // len(piece), piece.shape[-1])
        self.tensor.narrow(_ROWS, self.first, count).copy_(piece.movedim(0, _ROWS - 1))
        self.first += count

    def whole(self) -> torch.Tensor:
        assert self.tensor is not None, "there is at least one piece"
        return self.tensor.flatten(_ROWS - 1, _ROWS)


def _listed(arriving: Iterable[torch.Tensor], pieces: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What arrives, each also put into ``pieces``."""
    for piece in arriving:
        pieces.append(piece)
        yield piece


def _by_weight(grad: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.mm(grad.flatten(0, _ROWS).t(), rows.flatten(0, _ROWS))


def _check_first_derivative() -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "second derivatives of products that exchange their rows: plan without overlap_tensor=True"
        )
