"""Keeping what a region of a program makes for its backward pass in the host's memory, and bringing it back in time.

What autograd saves inside a region goes to the host as it is saved, on a stream of its own, and leaves the device with
its last use. In the backward pass the first saved tensor of a region that is needed brings back all that are left of it
and, ahead of their use, those of the region before, whose output this region took. So a device has what two regions
made at a time: a region waits for what the one before the last sent. What goes into a region stays, and so do weights.

Copies are of whole storages, each once, whatever views of it are saved. On a processor they are copies, too. Tensors of
other kinds than ``torch.Tensor`` (those of ``verify``, which plays all ranks in one process) stay where they are.

Rhu et al., "vDNN" (MICRO 2016), which offloads layer by layer in this way.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from passes.torch_compat.tensor_fields import versions


class HostLink(Protocol):
    """Both directions between a device and its host; nobody waits for a copy but who uses it."""

    def to_host(self, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The bytes on the host once the mark, which is returned beside them, is passed."""

    def to_device(self, host: torch.Tensor, mark: Any) -> tuple[torch.Tensor, Any]:
        """The same back, after ``mark``."""

    def wait(self, mark: Any) -> None:
        """Whatever the device computes from now on is computed after ``mark``."""


class ProcessorLink:
    """Of a processor, whose memory is the host's, and of what has no memory: copies at once."""

    def to_host(self, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return data.clone(), None

    def to_device(self, host: torch.Tensor, mark: Any) -> tuple[torch.Tensor, Any]:
        return host.clone(), None

    def wait(self, mark: Any) -> None:
        pass


class AcceleratorLink:
    """Of an accelerator: a stream for each direction, pinned memory; marks are events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._down, self._up = self._module.Stream(device), self._module.Stream(device)

    def to_host(self, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        self._down.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(self._down):
            host = torch.empty(data.numel(), dtype=data.dtype, device="cpu", pin_memory=True)
            host.copy_(data, non_blocking=True)
            mark = self._down.record_event()
        data.record_stream(self._down)
        return host, mark

    def to_device(self, host: torch.Tensor, mark: Any) -> tuple[torch.Tensor, Any]:
        # Its memory is the computing stream's, which may still work in it for those who had it before.
        data = torch.empty(host.numel(), dtype=host.dtype, device=self.device)
        self._up.wait_stream(self._module.current_stream(self.device))
        self._up.wait_event(mark)
        with self._module.stream(self._up):
            data.copy_(host, non_blocking=True)
            data.record_stream(self._up)  # it may be let go before anybody waited for it
            return data, self._up.record_event()

    def wait(self, mark: Any) -> None:
        self._module.current_stream(self.device).wait_event(mark)


class _OffloadThread(threading.local):
    """The region that this thread runs, the links that it has used, and what the last region sent."""

    def __init__(self) -> None:
        self.region: _Region | None = None
        self.links: dict[torch.device, HostLink] = {}
        self.sent: list[tuple[HostLink, Any]] = []
        #: By storage of what they give, the regions that something is left of.
        self.makers: weakref.WeakValueDictionary[StorageWeakRef, _Region] = weakref.WeakValueDictionary()


_thread = _OffloadThread()


class _HostStorage:
    """A storage on the host; on the device, too, from when it is brought until all that was saved of it was taken."""

    def __init__(self, region: _Region, data: torch.Tensor, link: HostLink) -> None:
        self.region, self.link = region, link
        self.host, self.mark = link.to_host(data)
        self.num_saved = self._left = 0
        self._data: torch.Tensor | None = None
        self._arrived: Any = None

    def bring(self) -> torch.Tensor:
        """Start the way back, unless it is there or under way."""
        if self._data is None:
            self._data, self._arrived = self.link.to_device(self.host, self.mark)
            self._left = self.num_saved
        return self._data

    def take(self) -> torch.Tensor:
        """The bytes on the device, for one of the tensors that autograd saved."""
        data = self.bring()
        self.link.wait(self._arrived)
        self._left -= 1
        if self._left <= 0:
            self._data = None
        return data


class _OnHost:
    """A saved tensor: a view of a storage on the host."""

    def __init__(self, storage: _HostStorage, tensor: torch.Tensor) -> None:
        storage.num_saved += 1
        self.storage, self.dtype = storage, tensor.dtype
        self.geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())

    def tensor(self) -> torch.Tensor:
        """The tensor on the device; its region's others, and those of the region before, come too."""
        with torch.no_grad():
            self.storage.region.bring()
            data = self.storage.take()
            return torch.empty(0, dtype=self.dtype, device=data.device).set_(data.untyped_storage(), *self.geometry)


class _Region:
    """One run of a region: what it sent to the host, and the region whose output it takes."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.staying = {_storage(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)}
        self.before = next(filter(None, (_thread.makers.get(key) for key in self.staying)), None)
        self.kept: dict[tuple[StorageWeakRef, int], weakref.ref[_HostStorage]] = {}
        self.marks: list[tuple[HostLink, Any]] = []

    def keep(self, tensor: torch.Tensor) -> _OnHost | torch.Tensor:
        """What to keep for ``tensor``: if the region made it, where it is on the host."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or not tensor.numel():
            return tensor
        if _storage(tensor) in self.staying:
            return tensor
        with torch.no_grad():
            tensor = tensor.resolve_conj().resolve_neg()
        key = _storage(tensor), versions([tensor])[0]
        known = self.kept.get(key)
        storage = None if known is None else known()
        if storage is None:
            storage = self._send(tensor)
            self.kept[key] = weakref.ref(storage)
        return _OnHost(storage, tensor)

    def _send(self, tensor: torch.Tensor) -> _HostStorage:
        link = _link(tensor.device)
        memory = tensor.untyped_storage()
        with torch.no_grad():
            data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory, 0, (memory.nbytes(),), (1,))
            storage = _HostStorage(self, data, link)
        self.marks.append((link, storage.mark))
        return storage

    def bring(self) -> None:
        """Bring back what is left of this region and of the one before."""
        for region in (self, self.before):
            for storage in region.left() if region is not None else ():
                storage.bring()

    def left(self) -> Iterator[_HostStorage]:
        yield from filter(None, (kept() for kept in self.kept.values()))

    def done(self, outputs: Any) -> None:
        """The region has run: its outputs tell who comes after it."""
        for tensor in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if isinstance(tensor, torch.Tensor) and type(tensor) is torch.Tensor:
                _thread.makers[_storage(tensor)] = self
        for link, mark in _thread.sent:
            link.wait(mark)
        _thread.sent = self.marks


def stay_on_device(tensors: Callable[[], Sequence[Any]]) -> None:
    """Tell the region that runs, if one offloads, that ``tensors()`` are not its own: weights and buffers."""
    if _thread.region is not None:
        _thread.region.staying |= {_storage(tensor) for tensor in tensors() if isinstance(tensor, torch.Tensor)}


@contextlib.contextmanager
def offloading(tensors: Sequence[Any]) -> Iterator[_Region]:
    """A region that takes ``tensors``: what autograd saves inside is for its ``keep``, its outputs for ``done``."""
    outer, region = _thread.region, _Region(tensors)
    _thread.region = region
    try:
        yield region
    finally:
        _thread.region = outer


def use_link(device: torch.device, link: HostLink) -> None:
    """Have what this thread's regions on ``device`` send go over ``link``."""
    _thread.links[device] = link


def _link(device: torch.device) -> HostLink:
    if device not in _thread.links:
        _thread.links[device] = ProcessorLink() if device.type in ("cpu", "meta") else AcceleratorLink(device)
    return _thread.links[device]


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
