"""Parts of tensors in files: what one rank saved of a parameter or its state is refused where another rank loads it.

``torch.save(parallel.state_dict(), path)`` on the first rank writes that rank's parts. A DTensor in a file does not say
whose part it is, so that every rank that reads the file would take it for its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from runtime.torch_compat.dtensors import spec_of

#: The attribute of a saved DTensor that names its rank; files keep attributes.
_ATTRIBUTE = "saved_by_rank"


def note_rank(tensor: DTensor) -> DTensor:
    """Let ``tensor``, on its way into a file, say which rank it is from."""
    if dist.is_initialized():
        setattr(tensor, _ATTRIBUTE, dist.get_rank())
    return tensor


def refuse_parts_of_others(tensors: Iterable[tuple[str, Any]], *, of_stage: bool = False) -> None:
    """Raise ValueError for a part that another rank saved.

    Args:
        tensors: with their names, in words.
        of_stage: whether they are told apart by their number alone, of which another pipeline stage's are others: then
            whole tensors are refused too.
    """
    for name, tensor in tensors:
        rank = getattr(tensor, _ATTRIBUTE, None) if isinstance(tensor, DTensor) else None
        if rank is None or (not of_stage and all(one.is_replicate() for one in spec_of(tensor).placements)):
            continue
        if not dist.is_initialized() or rank != dist.get_rank():
            raise ValueError(
                f"{name} is the part that rank {rank} saved, which is not this rank's: state_dict() of a parallel "
                "module and of its optimizer holds one rank's parts. Let each rank save and load a file of its own, or "
                "save whole tensors, by full_state_dict or planner.CheckpointManager"
            )
