"""Connections of process groups, which can be closed while another thread waits for a peer.

gloo has no abort: a rank that waits for one that stopped answering waits until its time-out. The connections that
groups and stores make inside of ``recorded`` are noted, so that ``close_recorded`` can end every wait on them at once,
also of those that are still being made.
Sockets are told by ``/proc``, so this is for Linux.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

_DESCRIPTORS = Path("/proc/self/fd")


class _Recorded:
    """Sockets by descriptor, each with what the system calls it, and whether any are noted.

    ``before`` has those that there were when the present block began; None outside of one.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.lock = threading.Lock()
        self.sockets: dict[int, str] = {}
        self.before: dict[int, str] | None = None

    def note_new(self) -> None:
        """Note what the present block has made so far, under the lock."""
        if self.before is not None:
            before = self.before
            self.sockets.update({fd: name for fd, name in _sockets().items() if before.get(fd) != name})


_noted = _Recorded()


def can_close_connections() -> bool:
    """Whether this system tells of sockets."""
    return _DESCRIPTORS.is_dir()


def record_connections() -> None:
    """Note the connections that are made inside of ``recorded`` from now on."""
    _noted.is_on = True


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Inside the block sockets are made that ``close_recorded`` is to close."""
    if not _noted.is_on:
        yield
        return
    with _noted.lock:
        _noted.before = _sockets()
    try:
        yield
    finally:
        with _noted.lock:
            _noted.note_new()
            _noted.before = None


def close_recorded() -> None:
    """End all waits on connections that were noted, with an error on both sides; nothing is noted any more."""
    with _noted.lock:
        _noted.note_new()
        sockets, _noted.sockets = _noted.sockets, {}
    if dist.is_initialized():
        for group in list(c10d._world.pg_map):
            with contextlib.suppress(RuntimeError):
                group.abort()  # of gloo it does nothing
    for descriptor, name in sockets.items():
        with contextlib.suppress(OSError):
            if os.readlink(_DESCRIPTORS / str(descriptor)) != name:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as own:
                own.getpeername()  # raises for one that listens, which must stay
                own.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, str]:
    """The system's names of this process's sockets, by descriptor."""
    names = {}
    for descriptor in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):
            name = os.readlink(_DESCRIPTORS / descriptor)
            if name.startswith("socket:"):
                names[int(descriptor)] = name
    return names
