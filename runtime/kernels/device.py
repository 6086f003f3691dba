"""The device that a kernel runs on: that of its operands, whichever is the current one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable

import torch

_STAYS = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """What is launched inside runs on ``device``.

    Triton launches on the current device and its stream, wherever the pointers lead.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _STAYS
    return torch.cuda.device(device)


def common_device(name: str, tensors: Iterable[torch.Tensor]) -> torch.device:
    """The one device that tensors are on.

    Args:
        name: of the operator, for the error.

    Raises:
        ValueError: if they are on several: a kernel would read the others' memory through wrong addresses.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        listed = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"{name} was given tensors on {listed}: expected all on one device; move them there first")
    return devices.pop()


@functools.cache
def processors_of(device: torch.device, *, elsewhere: int) -> int:
    """Multiprocessors of a GPU, or ``elsewhere`` for a device that is none."""
    if device.type != "cuda":
        return elsewhere
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
