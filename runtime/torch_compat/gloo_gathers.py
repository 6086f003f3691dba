"""Gathers over gloo under a short name: the long one that torch gives them corrupts the heap now and then.

Each of a gloo group's two threads notes the name of the operator that it has completed in one string of the group, with
no lock (``pgStatus_->lastCompletedWorkName`` in ``ProcessGroupGloo::runLoop``, torch 2.13). Up to 15 letters lie within
the string. ``ALLGATHER_COALESCED``, which a functional all-gather of one tensor is for gloo too, lies in memory of its
own: one thread frees it while the other writes to it. About one step in ten thousand died of that.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["gather_under_a_short_name"]

_OPERATOR = "allgather_into_tensor_coalesced_"
#: Keeps the kernel registered.
_library: torch.library.Library | None = None


def gather_under_a_short_name() -> None:
    """Let gathers of one tensor on CPUs be ``ALLGATHER``, for the whole process and for good: the same bytes."""
    global _library
    if _library is not None or not dist.is_available():
        return
    original = torch.library.get_kernel(f"c10d::{_OPERATOR}", "CPU")

    def gather(keys: Any, outputs: Any, inputs: Any, group: Any, async_op: bool = True) -> Any:
        output, single = outputs[0], inputs[0]
        # gloo cuts nothing into an empty piece a rank; where memory is no row as it stands torch copies
        is_row = single.numel() and single.is_contiguous() and output.is_contiguous()
        if len(outputs) != 1 or not is_row:
            return original.call_boxed(keys, outputs, inputs, group, async_op)
        # One row a rank, which a tensor without dimensions has not.
        work = dist.ProcessGroup.unbox(group)._allgather_base(output.view(-1), single.view(-1))
        return work.boxed()

    _library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        _library.impl(_OPERATOR, gather, "CPU", with_keyset=True)
