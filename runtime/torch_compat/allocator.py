"""How torch's allocator of a GPU takes memory from the driver."""

from __future__ import annotations

import functools
import os

import torch

#: In which a user says how.
_CHOSEN = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@functools.cache
def grow_segments() -> None:
    """Let blocks of memory grow, unless the user has said something of the allocator.

    A large tensor of the last step (logits) is cut up for small ones, and none of its size fits again: of 141 GB, 43
    were lost so in a step of GPT-2, whose plan fitted.
    """
    if not any(os.environ.get(name) for name in _CHOSEN):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
