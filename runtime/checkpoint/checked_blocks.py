"""Files with a checksum of every block: a reader checks the blocks that it reads, and reads no others."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from runtime.weight_files.format import read_exactly

#: Bytes of a block: what is read and checked at once, and held in memory for it.
BLOCK = 4 * 2**20


class BlockWriter:
    """Writes a file from its beginning to its end; ``checksums`` are those of its blocks, once it is closed."""

    def __init__(self, file: Path) -> None:
        self.checksums: list[int] = []
        self.size = 0
        self._stream = file.open("xb")
        self._checksum = 0

    def write(self, data: memoryview | bytes) -> None:
        """Append ``data``."""
        remaining = memoryview(data)
        while len(remaining):
            part = remaining[: BLOCK - self.size % BLOCK]
            self._checksum = zlib.crc32(part, self._checksum)
            self._stream.write(part)
            self.size += len(part)
            if self.size % BLOCK == 0:
                self._end_block()
            remaining = remaining[len(part) :]

    def _end_block(self) -> None:
        self.checksums.append(self._checksum)
        self._checksum = 0

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the file, all of it on disk."""
        try:
            if kind is None:
                if self.size % BLOCK:
                    self._end_block()
                self._stream.flush()
                os.fsync(self._stream.fileno())
        finally:
            self._stream.close()


class BlockReader:
    """Reads parts of a file that ``BlockWriter`` wrote; only one block is held at a time."""

    def __init__(self, file: Path, size: int, checksums: Sequence[int]) -> None:
        self.file, self.size, self.checksums = file, size, checksums
        self._descriptor = os.open(file, os.O_RDONLY)
        self._number = -1
        self._block = memoryview(bytearray(min(BLOCK, size)))

    def read(self, target: memoryview, begin: int) -> None:
        """Fill ``target`` from ``begin`` on.

        Raises:
            ValueError: naming the file, if a block is not what was written.
        """
        num_read = 0
        while num_read < len(target):
            number, start = divmod(begin + num_read, BLOCK)
            part = self._checked(number)[start : start + len(target) - num_read]
            target[num_read : num_read + len(part)] = part
            num_read += len(part)

    def _checked(self, number: int) -> memoryview:
        block = self._block[: min(BLOCK, self.size - number * BLOCK)]
        if number != self._number:
            self._number = -1
            read_exactly(self._descriptor, block, number * BLOCK)
            if zlib.crc32(block) != self.checksums[number]:
                first = number * BLOCK
                raise ValueError(
                    f"{self.file} is damaged: bytes {first:,} to {first + len(block):,} are not those that were "
                    "written; load an earlier checkpoint (step=)"
                )
            self._number = number
        return block

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._descriptor)
        # Freed now: whoever still names this reader opens the next one, which has a block of its own.
        self._block = memoryview(b"")
