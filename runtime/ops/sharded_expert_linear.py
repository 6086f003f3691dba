"""Rows that each take the weight of their expert, with experts sharded over mesh axes; no row is exchanged."""

from __future__ import annotations

from collections.abc import Sequence

import spmd_types as spmd
import torch
from spmd_types import P, V

from runtime.kernels.expert_linear import own_expert_linear
from runtime.kernels.routing_listeners import note_layer_routing
from runtime.ops.mesh_types import first_of_shard


def expert_linear(
    input: torch.Tensor, expert_ids: torch.Tensor, weight: torch.Tensor, *, num_experts: int, axes: Sequence[str]
) -> torch.Tensor:
    """``kernels.expert_linear`` where each rank has some of the experts: P on each of ``axes`` (outermost first).

    Args:
        input: [..., in], the same on all ranks of ``axes``.
        expert_ids: integers in [0, num_experts), [...], the same on all ranks of ``axes``.
        weight: this rank's experts, [num_experts / ranks, out, in].
        num_experts: experts of all ranks together.

    Returns:
        [..., out], zero where the expert is another rank's.
    """
    note_layer_routing(expert_ids, num_experts)
    local = expert_ids - first_of_shard(num_experts, axes, weight.device)
    rows = own_expert_linear(input, local, weight)
    for axis in axes:
        rows = spmd.reinterpret(rows, axis, src=V, dst=P)
    return rows
