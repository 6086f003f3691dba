"""The experts of a mixture with experts, their inner entries, or tokens and experts cut over mesh axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import R, S

from runtime.kernels.expert_activations import ACTIVATIONS
from runtime.kernels.experts import check_experts, own_experts
from runtime.kernels.routing_listeners import note_routing
from runtime.mesh.joint_axes import joint
from runtime.ops.expert_exchange import exchanged_experts
from runtime.ops.mesh_types import first_of_shard, groups_of

#: Dims of the first matrix [E, 2F, H] and of its bias [E, 2F] in which gate and up rows lie one behind the other.
_ROWS = 1


def experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    scores: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "swiglu",
    num_experts: int | None = None,
    expert_axes: Sequence[str] = (),
    token_axes: Sequence[str] = (),
    inner_axes: Sequence[str] = (),
) -> torch.Tensor:
    """``kernels.experts`` with this rank's part of the experts; partial sums on axes that cut these but no tokens.

    Args:
        x, expert_ids, scores: tokens [T, …], S on ``token_axes``, the same on the ranks of the other axes named.
        gate_up, down, gate_up_bias, down_bias: of this rank's experts; on ``inner_axes`` ``down`` has a piece of the
            inner entries, ``gate_up`` too unless its gate and up rows lie one behind the other (then it is whole, and
            this rank's rows are taken), ``down_bias`` is whole.
        num_experts: of all ranks together; required with ``expert_axes``.
        expert_axes: axes that cut the experts, outermost first.
        token_axes: those of them that cut the tokens too: expert parallelism. Tokens travel to the ranks of their
            experts and back, in two all-to-alls over all these axes together, and as many backward; how many go where
            is said in an all-gather of integers before. No token is dropped. Gradients of the experts are complete.
    """
    if inner_axes:
        ranks = math.prod(dist.get_world_size(group) for group in groups_of(inner_axes))
        down_bias = None if down_bias is None else down_bias / ranks  # outputs will be added up
        if gate_up.shape[_ROWS] != ACTIVATIONS[activation].halves * down.shape[2]:
            gate_up = _own_rows(gate_up, down, inner_axes)
            gate_up_bias = None if gate_up_bias is None else _own_rows(gate_up_bias, down, inner_axes)
    note_routing(expert_ids, len(gate_up) if num_experts is None else num_experts)
    if not expert_axes:
        check_experts(x, expert_ids, scores, gate_up, down, gate_up_bias, down_bias, activation)
        return own_experts(x, expert_ids, scores, gate_up, down, gate_up_bias, down_bias, activation)
    assert num_experts is not None, "experts that are cut need their whole number"
    if not token_axes:
        first = first_of_shard(num_experts, expert_axes, gate_up.device)
        own_ids = expert_ids - first  # those of other ranks' experts are outside of this rank's
        check_experts(x, own_ids, scores, gate_up, down, gate_up_bias, down_bias, activation)
        return own_experts(x, own_ids, scores, gate_up, down, gate_up_bias, down_bias, activation)
    group = groups_of(token_axes)[0] if len(token_axes) == 1 else joint(*token_axes)
    shards = _shards_in_reach(num_experts // len(gate_up), expert_axes, token_axes, gate_up.device)
    return exchanged_experts(
        x,
        expert_ids,
        scores,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        activation,
        shards=shards,
        rank=first_of_shard(group.size(), token_axes, x.device),
        group=group,
    )


def _own_rows(rows: torch.Tensor, down: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """This rank's gate and up rows of ``rows`` [E, 2F, …], in which one half lies behind the other."""
    halves = rows.unflatten(_ROWS, (2, -1))
    for axis in axes:
        halves = spmd.convert(halves, axis, src=R, dst=S(_ROWS + 1))
    return halves.flatten(_ROWS, _ROWS + 1)


def _shards_in_reach(
    num_shards: int, expert_axes: Sequence[str], token_axes: Sequence[str], device: torch.device
) -> torch.Tensor:
    """Which of all ranks' shards of the experts every rank of the group of ``token_axes`` holds, [ranks].

    Ranks that differ on other axes hold other shards, which other groups reach: on each such axis this rank's place is
    picked as a shard of the list of all.
    """
    sizes = [dist.get_world_size(group) for group in groups_of(expert_axes)]
    shards = torch.arange(num_shards, device=device).view(sizes)
    for dim, axis in enumerate(expert_axes):
        if axis not in token_axes:
            shards = spmd.convert(shards, axis, src=R, dst=S(dim))
    return shards.flatten()
