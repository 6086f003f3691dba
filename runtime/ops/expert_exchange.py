"""Expert parallelism: tokens and experts are cut over the ranks of one group, and tokens travel to their experts.

Forward: counts of rows, one all-gather of integers; rows to their experts; the experts; their outputs back. Backward:
gradients of outputs the way of the rows, gradients of rows the way of the outputs. Each moves every (token, expert)
pair once. Every rank takes part in every collective, with no rows if it has none, so that nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from runtime.kernels.dispatch import runs_triton
from runtime.kernels.expert_row_kernels import sums_of_choices
from runtime.kernels.experts import backward as experts_backward
from runtime.kernels.experts import check_experts, combined, flattened, output_type, without_autocast
from runtime.kernels.experts import forward as experts_forward
from runtime.kernels.library import in_dtype, wide
from runtime.torch_compat.process_groups import all_gather_along
from runtime.torch_compat.process_groups import functional_collectives as funcol
from runtime.torch_compat.rank_by_rank import as_sizes, on_each_rank


def exchanged_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    scores: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    *,
    shards: torch.Tensor,
    rank: torch.Tensor,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """``kernels.experts`` of this rank's tokens with the experts of all ranks of ``group``.

    Args:
        x, expert_ids, scores: this rank's tokens.
        gate_up, down, gate_up_bias, down_bias: of this rank's experts.
        shards: which of all shards of the experts (of as many as this rank has) each rank of the group holds, [ranks];
            pairs with experts of other shards contribute nothing.
        rank: this rank's place in the group, [1].
    """
    check_experts(x, expert_ids, scores, gate_up, down, gate_up_bias, down_bias, activation)
    operands = (gate_up, down, gate_up_bias, down_bias, shards, rank, activation, group)
    return flattened(_ExchangedExperts.apply, x, expert_ids, scores, *operands)


class _ExchangedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        scores: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        shards: torch.Tensor,
        rank: torch.Tensor,
        activation: str,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        if x.is_meta:  # only types are checked
            return x.new_empty(x.shape)
        order, counts = on_each_rank(_sorted_by_expert, expert_ids, shards, len(gate_up))
        all_counts = funcol.wait_tensor(all_gather_along(counts.unsqueeze(0), 0, group))
        rows, own_ids, sent, received = on_each_rank(_rows_to_send, x, expert_ids, order, all_counts, rank)
        visiting = _send(rows, sent, received, group)
        outputs, hidden = experts_forward(visiting, own_ids, None, gate_up, down, gate_up_bias, down_bias, activation)
        returned = _send(outputs, received, sent, group)
        (result,) = on_each_rank(_combined, returned, order, scores, x)
        ctx.save_for_backward(
            scores, gate_up, down, gate_up_bias, down_bias, order, visiting, own_ids, hidden, returned
        )
        ctx.activation, ctx.group, ctx.sizes = activation, group, (sent, received)
        ctx.gradients_together = True  # for whoever would ask for them one by one
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "second derivatives of experts on several ranks (expert parallelism): plan without the axis ep"
            )
        scores, *weights, order, visiting, own_ids, hidden, returned = ctx.saved_tensors
        sent, received = ctx.sizes
        needs = ctx.needs_input_grad
        by_output, by_scores = on_each_rank(_output_gradients, grad, returned, order, scores)
        by_visiting = _send(by_output, sent, received, ctx.group)
        needs_gradient = [needs[0], False, *needs[3:7]]
        by_rows, _, *by_weights = experts_backward(
            by_visiting, visiting, own_ids, None, *weights, hidden, ctx.activation, needs_gradient
        )
        by_x = None
        if needs[0]:
            (by_x,) = on_each_rank(_combined, _send(by_rows, received, sent, ctx.group), order, None, grad)
        gradients = (gradient if needed else None for gradient, needed in zip(by_weights, needs_gradient[2:]))
        return by_x, None, by_scores if needs[2] else None, *gradients, None, None, None, None

    @staticmethod
    def spmd_typecheck(
        *,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        scores: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        shards: torch.Tensor,
        rank: torch.Tensor,
    ) -> Any:
        import spmd_types as spmd

        spmd.rules.ignore(shards, rank)
        return output_type(x, expert_ids, scores, gate_up, down, gate_up_bias, down_bias)


def _sorted_by_expert(
    expert_ids: torch.Tensor, shards: torch.Tensor, num_own: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of all pairs [T·k] sorted by the rank and expert they go to, and how many go to each: [ranks, own].

    Pairs that go nowhere come last.
    """
    num_ranks = len(shards)
    flat = expert_ids.reshape(-1)
    owner = torch.bucketize(torch.div(flat, num_own, rounding_mode="floor"), shards)  # shards ascend
    owner = owner.clamp(max=num_ranks - 1)
    within = flat - shards[owner] * num_own
    nowhere = num_ranks * num_own
    target = torch.where((within >= 0) & (within < num_own), owner * num_own + within, nowhere)
    counts = torch.bincount(target, minlength=nowhere + 1)[:nowhere]
    return torch.argsort(target, stable=True), counts.view(num_ranks, num_own)


def _rows_to_send(
    x: torch.Tensor, expert_ids: torch.Tensor, order: torch.Tensor, all_counts: torch.Tensor, rank: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """Rows in the order in which they are sent; which of this rank's experts each row that it will receive is for,
    [R, 1]; and how many rows go to and come from every rank (the device is waited for)."""
    outgoing, incoming = all_counts[rank].squeeze(0), all_counts[:, rank].squeeze(1)  # [ranks, own experts]
    sent, received = torch.stack([outgoing.sum(1), incoming.sum(1)]).tolist()
    experts = torch.arange(incoming.shape[1], device=x.device).repeat(len(incoming))
    own_ids = torch.repeat_interleave(experts, incoming.flatten(), output_size=sum(received))
    token = order[: sum(sent)] // expert_ids.shape[1]
    return x[token], own_ids.unsqueeze(1), sent, received


def _combined(
    returned: torch.Tensor, order: torch.Tensor, scores: torch.Tensor | None, like: torch.Tensor
) -> tuple[torch.Tensor]:
    """Rows back at their tokens, weighed by the scores and added up: [T, H] as ``like``."""
    tokens, hidden = like.shape
    if runs_triton(returned):
        return (sums_of_choices(returned, order, scores, num_tokens=tokens),)
    k = len(order) // max(tokens, 1) if scores is None else scores.shape[1]
    rows = _at_places(returned, order).view(tokens, k, hidden)
    with without_autocast(like):
        return (combined(rows, scores, like.dtype).contiguous(),)


def _at_places(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """``rows`` of the first of the places ``order``, zeros at the rest."""
    result = rows.new_zeros((len(order), rows.shape[1]))
    result[order[: len(rows)]] = rows
    return result


def _output_gradients(
    grad: torch.Tensor, returned: torch.Tensor, order: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the rows that came back, and of the scores."""
    places = order[: len(returned)]
    rows = wide(grad[places // scores.shape[1]])
    weights = wide(scores.reshape(-1)[places]).unsqueeze(1)
    by_score = _at_places((rows * wide(returned)).sum(1, keepdim=True), order)
    return in_dtype(rows * weights, grad.dtype), by_score.view(scores.shape).to(scores.dtype)


def _send(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """All-to-all of rows, by how many go to and come from every rank."""
    result: torch.Tensor = funcol.wait_tensor(
        funcol.all_to_all_single(rows.contiguous(), as_sizes(received), as_sizes(sent), group)
    )
    return result
