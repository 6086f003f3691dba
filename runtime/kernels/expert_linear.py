"""A linear layer of which every row takes the weight of its own expert.

Rows are sorted by expert, multiplied group by group, and put back; backward keeps the input, the ids and the weight,
and sorts again. No row is padded or dropped.
"""

from __future__ import annotations

from typing import Any

import torch

from runtime.kernels.grouped_matmul import grouped_matmul, grouped_weight_gradient, rows_by_expert
from runtime.kernels.library import differentiable, differentiable_again, gradients_of, register
from runtime.kernels.routing_listeners import note_layer_routing


def expert_linear(input: torch.Tensor, expert_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``input @ weight[expert_ids].T``, row by row.

    Args:
        input: [..., in].
        expert_ids: int32 or int64, [...]; its dims and those of ``input`` before the last broadcast.
        weight: [experts, out, in], with any strides.

    Returns:
        [..., out], zero where the expert is none of ``weight``.

    Raises:
        ValueError: if the shapes or dtypes do not fit.
    """
    if weight.dim() != 3 or input.dim() < 1 or weight.shape[2] != input.shape[-1]:
        raise ValueError(
            f"input is {tuple(input.shape)} and weight {tuple(weight.shape)}: expected [..., in] and [experts, out, in]"
        )
    if input.dtype != weight.dtype or expert_ids.is_floating_point():
        raise ValueError(
            f"input is {input.dtype}, weight {weight.dtype} and expert_ids {expert_ids.dtype}: expected one dtype for "
            "input and weight, and integers"
        )
    note_layer_routing(expert_ids, len(weight))
    return own_expert_linear(input, expert_ids, weight)


def own_expert_linear(input: torch.Tensor, expert_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``expert_linear`` of which nobody is told where tokens go: some of a mixture's experts."""
    result: torch.Tensor = _forward(input, expert_ids, weight)
    return result


class _Sorted:
    """The rows of one call, as they are sorted by expert."""

    def __init__(self, input: torch.Tensor, expert_ids: torch.Tensor, weight: torch.Tensor) -> None:
        self.lead = torch.broadcast_shapes(input.shape[:-1], expert_ids.shape)
        self.order, self.offsets = rows_by_expert(expert_ids.expand(self.lead).reshape(-1), weight.shape[0])
        tokens = input.shape[:-1]
        count = tokens.numel()
        self.sources = torch.arange(count, device=input.device).view(tokens).expand(self.lead).reshape(-1)[self.order]
        self.rows = input.reshape(count, input.shape[-1])[self.sources]

    def unsorted(self, rows: torch.Tensor) -> torch.Tensor:
        """Sorted rows where they came from, [*lead, width]."""
        result = torch.empty_like(rows)
        result[self.order] = rows
        return result.view(*self.lead, rows.shape[-1])


def _aten(input: torch.Tensor, expert_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    batch = _Sorted(input, expert_ids, weight)
    return batch.unsorted(grouped_matmul(batch.rows, weight, batch.offsets))


def _aten_backward(
    grad: torch.Tensor, input: torch.Tensor, expert_ids: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    batch = _Sorted(input, expert_ids, weight)
    grad_rows = grad.reshape(-1, grad.shape[-1])[batch.order]
    grad_input = batch.unsorted(grouped_matmul(grad_rows, weight.transpose(1, 2), batch.offsets))
    return grad_input.sum_to_size(input.shape), grouped_weight_gradient(grad_rows, batch.rows, batch.offsets)


def _plain_backward(
    grad: torch.Tensor, input: torch.Tensor, expert_ids: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    def product(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        exists = (expert_ids >= 0) & (expert_ids < len(weight))
        products = (input.unsqueeze(-2) @ weight.mT[torch.where(exists, expert_ids, 0)]).squeeze(-2)
        return torch.where(exists.unsqueeze(-1), products, 0.0)

    return gradients_of(product, (input, weight), grad)


def _shape(input: torch.Tensor, expert_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return input.new_empty((*torch.broadcast_shapes(input.shape[:-1], expert_ids.shape), weight.shape[1]))


def _shapes_backward(
    grad: torch.Tensor, input: torch.Tensor, expert_ids: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return input.new_empty(input.shape), weight.new_empty(weight.shape)


_forward = register(
    "expert_linear(Tensor input, Tensor expert_ids, Tensor weight) -> Tensor", aten=_aten, triton=_aten, shapes=_shape
)
_backward = register(
    "expert_linear_backward(Tensor grad, Tensor input, Tensor expert_ids, Tensor weight) -> (Tensor, Tensor)",
    aten=_aten_backward,
    triton=_aten_backward,
    shapes=_shapes_backward,
)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grad_input, grad_weight = _backward(grad, *ctx.saved_tensors)
    return grad_input, None, grad_weight


differentiable(_forward, save=_save, backward=_gradient)
differentiable_again(_backward, _plain_backward)
