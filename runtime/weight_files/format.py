"""The safetensors file format: eight bytes with the length of a JSON header, the header, the tensors' bytes.

https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cost_models.files import parse_json

LENGTH_BYTES = 8
#: The longest header that the reference implementation reads.
MAX_HEADER_BYTES = 100_000_000

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: where its bytes are. ``begin`` counts from the start of the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> tuple[dict[str, Stored], int]:
    """The tensors of a file by name, and how many bytes were read to know them.

    Raises:
        ValueError: if it is no safetensors file, is cut short, or holds a dtype that PyTorch has not.
    """
    if not file.is_file():
        raise ValueError(f"{file} is not a file")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or not 0 < length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            raise ValueError(f"{file} is not a safetensors file, or it is cut short: its header does not fit into it")
        try:
            header = parse_json(stream.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            start = LENGTH_BYTES + length
            tensors = {name: _stored(file, name, entry, start) for name, entry in entries.items()}
            end = max((stored.begin + stored.num_bytes for stored in tensors.values()), default=start)
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            reason = error if isinstance(error, ValueError) else f"it says something else of a tensor: {error!r}"
            raise ValueError(f"{file} is not a safetensors file: its header cannot be read ({reason})") from error
    if end > size:
        raise ValueError(f"{file} is cut short: it has {size} bytes, its header speaks of {end}")
    return tensors, start


def _stored(file: Path, name: str, entry: Mapping[str, Any], start: int) -> Stored:
    begin, end = _counts(entry["data_offsets"])
    shape = _counts(entry["shape"])
    dtype = DTYPES.get(str(entry["dtype"]))
    if dtype is None:
        raise ValueError(
            f"{name!r} is stored as {str(entry['dtype'])[:40]!r}, which is none of {', '.join(DTYPES)}: "
            "convert the file"
        )
    stored = Stored(file, dtype, shape, start + begin)
    if end - begin != stored.num_bytes:
        raise ValueError(f"damaged: {name!r} of shape {list(shape)} cannot take {end - begin} bytes")
    return stored


def _counts(numbers: Sequence[Any]) -> tuple[int, ...]:
    if not all(isinstance(number, int) and 0 <= number < 2**63 for number in numbers):
        raise ValueError("sizes and offsets are whole numbers of at most 63 bits")
    return tuple(numbers)


def make_header(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """Header of a file with these tensors, and where each one's bytes begin in it.

    Raises:
        ValueError: for a dtype that the format has not.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    # Wide elements first: so all lie at multiples of their size, as readers that map the file want it.
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -tensor[1].itemsize):
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"{name!r} is {dtype}, which safetensors files cannot hold: give another dtype=")
        begins[name], end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begins[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    start = LENGTH_BYTES + len(text)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, {name: start + at for name, at in begins.items()}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def read_exactly(descriptor: int, target: memoryview, begin: int) -> None:
    """Fill ``target`` from ``begin`` in a file.

    Raises:
        ValueError: if the file ends before.
    """
    num_read = 0
    while num_read < len(target):
        count = os.preadv(descriptor, [target[num_read:]], begin + num_read)
        if count == 0:
            raise ValueError("the file was cut short while it was read")
        num_read += count


def write_exactly(descriptor: int, source: memoryview, begin: int) -> None:
    """Put all of ``source`` at ``begin`` in a file."""
    num_written = 0
    while num_written < len(source):
        num_written += os.pwrite(descriptor, source[num_written:], begin + num_written)
