"""Rows of bytes by key in a ring of memory and files, which the processes of a node share; the oldest are overwritten.

The ring's slots are first those in memory (a file of shared memory), then those in a file on disk, which is mapped. A
row stays where it was written: every sample is read once an epoch, so none deserves the faster place more than another.
The index says which key each slot has, and in a second ring which slots were written last.
The files have no names: they are gone with the last process that has them open, however it ends. Other processes of the
node open them by way of the process that made them.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from runtime.agreement.ranks_together import Ranks

#: Bytes of a key, of a number, and of the head of the index: a token that says which ring it is, how many rows were
#: written, and how many of them in the ring's order.
KEY_BYTES, TOKEN_BYTES, NUMBER_BYTES = 16, 16, 8
HEAD_BYTES = TOKEN_BYTES + 2 * NUMBER_BYTES
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class RingSizes:
    """Bytes of a row, and how many slots there are in memory and on disk."""

    row_bytes: int
    memory_slots: int
    disk_slots: int

    @property
    def slots(self) -> int:
        return self.memory_slots + self.disk_slots


@dataclass(frozen=True)
class _RingAddress:
    """Where a process of this node has a ring's files open: index, memory, disk."""

    host: str
    process: int
    descriptors: tuple[int, int, int]
    token: bytes
    sizes: RingSizes


class SampleRing:
    """Rows of equal size by key.

    Args:
        files: of the index, the slots in memory and those on disk, opened by this process.
    """

    def __init__(self, files: tuple[BinaryIO, BinaryIO, BinaryIO], sizes: RingSizes) -> None:
        self.sizes = sizes
        self._files = files
        self._index = mmap.mmap(files[0].fileno(), _index_bytes(sizes))
        self._parts = [_mapped(file, count * sizes.row_bytes) for file, count in zip(files[1:], self._counts)]
        self._slots: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._num_seen = 0

    @property
    def _counts(self) -> tuple[int, int]:
        return self.sizes.memory_slots, self.sizes.disk_slots

    @staticmethod
    def create(sizes: RingSizes, folder: Path | None) -> SampleRing:
        """A new one, empty; ``folder`` is for what is on disk.

        Raises:
            ValueError: if there is not as much room.
        """
        memory = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else folder
        files = (
            _file(memory, _index_bytes(sizes), "the activation cache's index"),
            _file(memory, sizes.row_bytes * sizes.memory_slots, "memory_bytes of the activation cache"),
            _file(folder, sizes.row_bytes * sizes.disk_slots, "disk_bytes of the activation cache"),
        )
        ring = SampleRing(files, sizes)
        ring._index[:TOKEN_BYTES] = secrets.token_bytes(TOKEN_BYTES)
        return ring

    @property
    def address(self) -> _RingAddress:
        index, memory, disk = (file.fileno() for file in self._files)
        return _RingAddress(
            socket.gethostname(), os.getpid(), (index, memory, disk), bytes(self._index[:TOKEN_BYTES]), self.sizes
        )

    @staticmethod
    def opened(address: _RingAddress) -> SampleRing | None:
        """The ring of another process of this node; None if it cannot be reached (a container of its own)."""
        try:
            paths = [f"/proc/{address.process}/fd/{descriptor}" for descriptor in address.descriptors]
            index, memory, disk = (Path(path).open("r+b", buffering=0) for path in paths)  # noqa: SIM115
            ring = SampleRing((index, memory, disk), address.sizes)  # type: ignore[arg-type]
        except (OSError, ValueError):
            return None
        return ring if ring._index[:TOKEN_BYTES] == address.token else None

    def read(self, keys: Sequence[bytes]) -> torch.Tensor | None:
        """Copies of the rows, uint8 [keys, bytes of a row]; None if one is missing."""
        with self._locked(fcntl.LOCK_SH):
            self._look()
            slots = [self._slots.get(key) for key in keys]
            if None in slots:
                return None
            return torch.stack([self._row(slot) for slot in slots if slot is not None])

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether there is a row, for each of ``keys``."""
        with self._locked(fcntl.LOCK_SH):
            self._look()
            return [key in self._slots for key in keys]

    def write(self, keys: Sequence[bytes], rows: torch.Tensor, *, replaced: Sequence[bytes] | None = None) -> None:
        """Keep rows, uint8 [keys, bytes of a row], whose keys are new.

        Args:
            replaced: for each the key of a row whose place it takes; where there is none, or without ``replaced``, it
                takes that of the oldest.
        """
        with self._locked(fcntl.LOCK_EX):
            self._look()
            for key, row, old in zip(keys, rows, replaced or [b""] * len(keys), strict=True):
                if key in self._slots:
                    continue
                in_order, slot = self._number(1), self._slots.get(old)
                if slot is None:
                    slot = in_order % self.sizes.slots
                    self._set_number(1, in_order + 1)
                self._row(slot).copy_(row)
                self._note(slot, key)
                self._look()

    def _note(self, slot: int, key: bytes) -> None:
        """Say that a slot was written."""
        start = HEAD_BYTES + slot * KEY_BYTES
        self._index[start : start + KEY_BYTES] = key
        written = self._number(0)
        self._set_number(2 + self.sizes.slots * KEY_BYTES // NUMBER_BYTES + written % self.sizes.slots, slot)
        self._set_number(0, written + 1)

    def _number(self, place: int) -> int:
        """A number of the index behind the token: two of its head, then keys, then slots in the order of writing."""
        start = TOKEN_BYTES + place * NUMBER_BYTES
        return int.from_bytes(self._index[start : start + NUMBER_BYTES], "little")

    def _set_number(self, place: int, number: int) -> None:
        start = TOKEN_BYTES + place * NUMBER_BYTES
        self._index[start : start + NUMBER_BYTES] = number.to_bytes(NUMBER_BYTES, "little")

    def _row(self, slot: int) -> torch.Tensor:
        part, place = (0, slot) if slot < self.sizes.memory_slots else (1, slot - self.sizes.memory_slots)
        start = place * self.sizes.row_bytes
        return self._parts[part][start : start + self.sizes.row_bytes]

    def _look(self) -> None:
        """Take up what was written since the last look, by any process."""
        written, slots = self._number(0), self.sizes.slots
        if written - self._num_seen > slots:  # more than the index tells one by one
            changed: Iterable[int] = range(slots)
        else:
            log = 2 + slots * KEY_BYTES // NUMBER_BYTES
            changed = [self._number(log + number % slots) for number in range(self._num_seen, written)]
        for slot in changed:
            start = HEAD_BYTES + slot * KEY_BYTES
            key = bytes(self._index[start : start + KEY_BYTES])
            before = self._keys.get(slot, b"")
            if self._slots.get(before) == slot:
                del self._slots[before]
            if any(key):
                self._keys[slot], self._slots[key] = key, slot
        self._num_seen = written

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        fcntl.flock(self._files[0], kind)
        try:
            yield
        finally:
            fcntl.flock(self._files[0], fcntl.LOCK_UN)


def shared_ring(ranks: Ranks, ring: SampleRing | None, sizes: RingSizes, folder: Path | None) -> SampleRing:
    """The ring of this node; all ranks must call it.

    Args:
        ring: what this process has already: that of the node's first process that has one serves all that have none.

    Raises:
        ValueError: on all ranks, if there is no room for a new one.
    """
    host = socket.gethostname()
    places = ranks.gathered((host, ring is not None))
    number = 0 if ranks.group is None else ranks.group.rank()
    own = [place for place, (name, _) in enumerate(places) if name == host]
    maker = next((place for place in own if places[place][1]), own[0])
    if ring is None and maker == number:
        ring = ranks.together(lambda: SampleRing.create(sizes, folder))
    else:
        ranks.together(lambda: None)
    address = ranks.gathered(None if ring is None or maker != number else ring.address)[maker]
    if ring is None and address is not None:
        ring = SampleRing.opened(address)
    return ranks.together(lambda: ring or SampleRing.create(sizes, folder))


def _index_bytes(sizes: RingSizes) -> int:
    return HEAD_BYTES + (KEY_BYTES + NUMBER_BYTES) * sizes.slots


def _file(folder: Path | None, num_bytes: int, what: str) -> BinaryIO:
    """A file without a name, of so many bytes that surely are there."""
    file: BinaryIO = tempfile.TemporaryFile(dir=folder, buffering=0)  # type: ignore[assignment]  # noqa: SIM115
    try:
        os.posix_fallocate(file.fileno(), 0, max(1, num_bytes))
    except OSError as error:
        file.close()
        raise ValueError(
            f"no room for {num_bytes:,} bytes in {folder or tempfile.gettempdir()}, which {what} needs ({error}): ask "
            "for less, or name another folder"
        ) from error
    return file


def _mapped(file: BinaryIO, num_bytes: int) -> torch.Tensor:
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
