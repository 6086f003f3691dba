"""Thin adapters over faults of the versions of ``spmd_types`` and torch that we support."""

from __future__ import annotations

import warnings
from typing import Any

import spmd_types
import torch
import torch.distributed as dist

from runtime.torch_compat.gloo_gathers import gather_under_a_short_name
from runtime.torch_compat.process_groups import exchanges_lists
from runtime.torch_compat.spmd_internals import (
    accept_any_stride_in_all_reduce,
    reduce_as_autocast_computes,
    send_nothing_over_one_rank,
)

_applied = False


def apply_adapters() -> None:
    """Apply all adapters, once a process."""
    global _applied
    if _applied:
        return
    _applied = True
    accept_any_stride_in_all_reduce()
    send_nothing_over_one_rank()
    reduce_as_autocast_computes()
    gather_under_a_short_name()
    spmd_types.set_dist(_Distributed())
    # It calls functions under the names they have in torch 2.11; later versions warn at each call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"spmd_types(\.|$)")


class _Distributed:
    """``torch.distributed`` for ``spmd_types``, with an all-to-all on every backend."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def all_to_all(
        outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: dist.ProcessGroup | None = None
    ) -> None:
        group = group or dist.group.WORLD
        assert group is not None, "the process group is there"
        inputs = [tensor.resolve_conj() for tensor in inputs]
        if exchanges_lists(group, inputs[0].device):
            dist.all_to_all(outputs, inputs, group=group)
        else:
            exchange_as_one_tensor(outputs, inputs, group)


def exchange_as_one_tensor(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """``dist.all_to_all`` of lists through one of their elements in a row: as many bytes, in one collective."""
    sent, received = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
    elements = inputs[0].new_empty(sum(received))
    dist.all_to_all_single(elements, torch.cat([tensor.reshape(-1) for tensor in inputs]), received, sent, group=group)
    for output, part in zip(outputs, elements.split(received), strict=True):
        output.copy_(part.view(output.shape))
