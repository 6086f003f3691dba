"""Copies from the host to an accelerator that the host does not wait for: a whole batch at once, from pinned memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

#: Where tensors begin in a buffer that several share, in bytes.
_ALIGNMENT = 256


class CopyEngine(Protocol):
    """The operations that copies need of a device."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Host memory that the device can read by itself, not to be given out again while it is being read."""

    def is_pinned(self, tensor: torch.Tensor) -> bool: ...

    def start(self, host: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """The tensors on the device, for what is queued there from now on, and what waits until they were read."""


class StreamOfCopies:
    """An accelerator's copies on a stream of their own, beside what it still computes of the step before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._stream: Any = None

    def pinned(self, num_bytes: int) -> torch.Tensor:
        # torch's allocator of pinned memory keeps what is freed until the copies from it have ended.
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def start(self, host: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], None]]:
        if self._stream is None:
            self._stream = self._module.Stream(self.device)
        computing = self._module.current_stream(self.device)
        with self._module.stream(self._stream):
            copies = [tensor.to(self.device, non_blocking=True) for tensor in host]
            copied = self._stream.record_event()
        computing.wait_event(copied)
        for tensor in copies:
            # Its memory is the copying stream's: not to be used again there before the computing stream is done.
            tensor.record_stream(computing)
        return copies, copied.synchronize


class HostCopies:
    """Brings inputs to a device.

    Args:
        engine: of the device.
    """

    def __init__(self, engine: CopyEngine) -> None:
        self.engine = engine
        self._wait: Callable[[], None] | None = None

    def bring(
        self, parts: Sequence[torch.Tensor], *, otherwise: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Tensors on the host as contiguous ones on the device, in one copy; a part that comes twice is copied once.

        What is pinned and contiguous is copied from where it is; ``settle`` then waits until it may be overwritten.

        Args:
            otherwise: brings what is not plain data on the host.
        """
        distinct = {_identity(part): part for part in parts if is_plain_on_host(part)}
        ready = {key: part.detach() for key, part in distinct.items() if self._is_ready(part)}
        gathered = {key: part for key, part in distinct.items() if key not in ready}
        there: dict[Any, torch.Tensor] = {}
        if distinct:
            buffer, begins = self._gather(list(gathered.values()))
            (whole, *copies), wait = self.engine.start([buffer, *ready.values()])
            if ready:
                self._wait = wait
            there = dict(zip(ready, copies))
            there |= {
                key: _over(whole, begin, part.shape, part.dtype) for (key, part), begin in zip(gathered.items(), begins)
            }
        return [there[_identity(part)] if is_plain_on_host(part) else otherwise(part) for part in parts]

    def settle(self) -> None:
        """Wait until memory of callers was read, which they may overwrite as soon as their call returns."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()

    def _is_ready(self, part: torch.Tensor) -> bool:
        return part.is_contiguous() and self.engine.is_pinned(part)

    def _gather(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
        """One pinned buffer with all of ``parts``, and where each begins in it."""
        begins, end = [], 0
        for part in parts:
            begins.append(end)
            end += math.ceil(part.numel() * part.itemsize / _ALIGNMENT) * _ALIGNMENT
        buffer = self.engine.pinned(end)
        for part, begin in zip(parts, begins):
            _over(buffer, begin, part.shape, part.dtype).copy_(part.detach())
        return buffer, begins


def _identity(part: torch.Tensor) -> tuple[Any, ...]:
    return part.data_ptr(), part.shape, part.stride(), part.dtype


def _over(buffer: torch.Tensor, begin: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over a part of a buffer of bytes, which autograd does not take for a view of it."""
    strides = torch.empty(shape, device="meta").stride()
    tensor = torch.empty(0, dtype=dtype, device=buffer.device)
    return tensor.set_(buffer.untyped_storage(), begin // dtype.itemsize, shape, strides)


def host_copies(device: torch.device) -> HostCopies | None:
    """Copies to ``device``; None where there is nothing to copy."""
    return None if device.type in ("cpu", "meta") else HostCopies(StreamOfCopies(device))


def is_plain_on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor is bytes in the host's memory, without history."""
    return (
        tensor.device.type == "cpu"
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
