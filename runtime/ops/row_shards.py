"""Matrix products whose rows a mesh axis cuts before or after them: exchanged in pieces, while others are multiplied.

``gathered_linear`` multiplies the rows of all ranks with this rank's features, ``scattered_linear`` sums products of
all ranks' parts of the contracted dim and keeps this rank's rows. While one piece is on its way another is multiplied
(Wang et al., "Overlap communication with dependent computation via decomposition in large deep learning models", 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    (group,) = groups_of((axis,))
    result: torch.Tensor = _GatheredLinear.apply(x, weight, bias, group)
    return result


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


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return _in_order((F.linear(rows, weight, bias) for rows in _gathered(x, group)), _all_rows(x, group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        _check_first_derivative()
        x, weight = ctx.saved_tensors
        by_x = by_weight = by_bias = None
        # sent before the gradient's pieces, needed after them
        sent = all_gather_along(x.contiguous().unsqueeze(0), 0, ctx.group) if ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[0]:
            by_x = _scattered(grad, weight.t(), ctx.group)
        if sent is not None:
            by_weight = _by_weight(_of_ranks(grad, ctx.group), funcol.wait_tensor(sent))
        if ctx.needs_input_grad[2]:
            by_bias = grad.flatten(0, _ROWS).sum(0)
        return by_x, by_weight, by_bias, None

    @staticmethod
    def spmd_typecheck(
        *, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup
    ) -> Any:
        rows: Any = spmd.rules.all_gather(x, group, src=S(x.dim() + _ROWS), dst=R)
        if bias is None:
            return product_type("...h,vh->...v", rows, weight)
        return product_type("...h,vh,v->...v", rows, weight, bias)


class _ScatteredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return _scattered(x, weight, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        _check_first_derivative()
        x, weight = ctx.saved_tensors
        by_x = by_weight = None
        pieces: list[torch.Tensor] = []
        gathered = _listed(_gathered(grad, ctx.group), pieces)
        if ctx.needs_input_grad[0]:
            by_x = _in_order((F.linear(rows, weight.t()) for rows in gathered), x.shape[_ROWS])
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


def _scattered(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's rows of the sum over all ranks of ``F.linear(x, weight)``; each piece is sent once it is there."""
    rows = _of_ranks(x, group)
    pieces = rows.chunk(pieces_of_rows(rows.shape[_ROWS]), dim=_ROWS)
    sent = [reduce_scatter_along(F.linear(piece, weight), "sum", 0, group) for piece in pieces]
    return torch.cat([funcol.wait_tensor(piece).squeeze(0) for piece in sent], dim=_ROWS)


def _all_rows(shard: torch.Tensor, group: dist.ProcessGroup) -> int:
    return shard.shape[_ROWS] * dist.get_world_size(group)


def _of_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[..., rows, width] as [ranks, ..., rows / ranks, width]."""
    return x.unflatten(_ROWS, (dist.get_world_size(group), -1)).movedim(_ROWS - 1, 0)


def _in_order(pieces: Iterable[torch.Tensor], rows: int) -> torch.Tensor:
    """Pieces [ranks, ..., rows / ranks / pieces, width] as one tensor [..., rows, width]."""
    whole: torch.Tensor | None = None
    first = 0
    for piece in pieces:
        count = piece.shape[_ROWS]
        if whole is None:
            whole = piece.new_empty(*piece.shape[1:_ROWS], len(piece), rows // len(piece), piece.shape[-1])
        whole.narrow(_ROWS, first, count).copy_(piece.movedim(0, _ROWS - 1))
        first += count
    assert whole is not None, "there is at least one piece"
    return whole.flatten(_ROWS - 1, _ROWS)


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
