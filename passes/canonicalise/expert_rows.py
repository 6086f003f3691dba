"""A linear layer of which every row takes the weight of its own expert: what grouped and gathered products compute.

    expert_linear(input[..., in], expert_ids[...], weight[experts, out, in]) -> [..., out]

Rows stay where they are: whoever computes it may sort them by expert inside. So rows are independent of each other, and
the dims in front of ``in`` may be cut.
"""

from __future__ import annotations

from typing import Any

import torch

from passes.torch_compat.tensor_fields import FakeTensor


def expert_linear(input: torch.Tensor, expert_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``input @ weight[expert_ids].T``, row by row.

    Args:
        input: [..., in].
        expert_ids: integers, [...]; its dims and those of ``input`` before the last broadcast.
        weight: [experts, out, in].

    Returns:
        [..., out], zero where the expert is none of ``weight``.
    """
    if input.is_meta or isinstance(input, FakeTensor):
        result: torch.Tensor = _WithoutData.apply(input, expert_ids, weight)
        return result
    shape = torch.broadcast_shapes(input.shape[:-1], expert_ids.shape)
    rows = input.expand(*shape, input.shape[-1]).reshape(-1, input.shape[-1])
    ids = expert_ids.expand(shape).reshape(-1)
    result = rows.new_zeros((len(rows), weight.shape[1]))
    for expert, matrix in enumerate(weight):
        places = (ids == expert).nonzero().flatten()
        result = result.index_copy(0, places, rows[places] @ matrix.T)
    return result.reshape(*shape, weight.shape[1])


class _WithoutData(torch.autograd.Function):
    """What the operator keeps for its backward pass, and the product it makes, on tensors without data."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, expert_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, expert_ids, weight)
        shape = torch.broadcast_shapes(input.shape[:-1], expert_ids.shape)
        rows = input.expand(*shape, input.shape[-1]).reshape(-1, input.shape[-1])
        return torch.mm(rows, weight[0].T).view(*shape, weight.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError("shapes only")
