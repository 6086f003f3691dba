"""What a checkpoint that is written in the background writes: a copy on the host, taken from the device at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from runtime.checkpoint.rectangles_of_tensors import Content, Piece
from runtime.torch_compat.host_state import copy_tensors, pinned_like


def device_of(content: Content) -> torch.device | None:
    """The accelerator that pieces of ``content`` are on; None if all are on the host."""
    devices = (value.tensor.device for value in content.values() if isinstance(value, Piece))
    return next((device for device in devices if device.type != "cpu"), None)


class HostStaging:
    """Copies pieces to the host.

    Pinned buffers are kept for the next checkpoint, so the copies of one must be written before the next is staged.

    Args:
        pinned_like: makes pinned tensors on the host like those of a dict.
        copy: starts to copy the tensors of one dict into those of another.
        synchronize: waits until what was started on a device has ended.
    """

    def __init__(
        self,
        *,
        pinned_like: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = pinned_like,
        copy: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None] = copy_tensors,
        synchronize: Callable[[torch.device], None] = lambda device: torch.get_device_module(device).synchronize(
            device
        ),
    ) -> None:
        self._pinned_like, self._copy, self._synchronize = pinned_like, copy, synchronize
        self._buffers: dict[str, torch.Tensor] = {}

    def staged(self, content: Content) -> Content:
        """``content`` with pieces on the host that nobody else changes; they are complete."""
        on_device = {
            name: value.tensor.detach()
            for name, value in content.items()
            if isinstance(value, Piece) and value.tensor.device.type != "cpu"
        }
        self._make_buffers(on_device)
        self._copy(on_device, {name: self._buffers[name] for name in on_device})
        copied: Content = {}
        for name, value in content.items():
            if not isinstance(value, Piece):
                copied[name] = value
            elif name in on_device:
                copied[name] = Piece(self._buffers[name], value.shape, value.offsets)
            else:
                copied[name] = value.copied()
        for device in {tensor.device for tensor in on_device.values()}:
            self._synchronize(device)
        return copied

    def _make_buffers(self, tensors: dict[str, torch.Tensor]) -> None:
        """Keep the buffers that fit, drop the others, and make those that lack."""
        self._buffers = {
            name: buffer
            for name, buffer in self._buffers.items()
            if name in tensors and (buffer.shape, buffer.dtype) == (tensors[name].shape, tensors[name].dtype)
        }
        self._buffers |= self._pinned_like({name: one for name, one in tensors.items() if name not in self._buffers})
