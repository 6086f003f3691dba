"""Keys of samples by content: what the frozen layers read of each, and what else their output depends on.

A sample whose inputs were changed on the way (augmented) is another one, so that nothing is read that computing would
not give; no loader has to say which samples a batch has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

import torch

from planner.activation_cache.sample_ring import KEY_BYTES
from runtime.calls.model_call import ModelCall, Path
from runtime.state.owned import Owned

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 2**64


def sample_keys(call: ModelCall, paths: Collection[Path], by_row: Collection[Path], common: str) -> list[bytes]:
    """A key for each sample of this rank's part of a batch.

    Args:
        paths: of the inputs that the frozen layers read; ``by_row``: those of them with a row a sample.
        common: what all samples' outputs depend on beside these.

    Raises:
        ValueError: if an input is not there, or they are of different numbers of samples.
    """
    missing = [path for path in paths if path not in call.tensors]
    if missing:
        name = ".".join(map(str, missing[0]))
        raise ValueError(
            f"the activation cache tells samples apart by the inputs of the frozen layers, and {name!r} was not passed "
            "on this rank: pass all of parallel.needed_inputs on every rank"
        )
    base = hashlib.blake2b(repr((common, call.signature[1])).encode(), digest_size=KEY_BYTES)
    rows = []
    for path in sorted(paths, key=str):
        tensor = call.tensors[path].detach().cpu().contiguous()
        is_by_row = path in by_row
        base.update(repr((path, str(tensor.dtype), tuple(tensor.shape[is_by_row:]))).encode())
        if is_by_row:
            rows.append(_bytes_of(tensor).reshape(tensor.shape[0], -1).numpy())
        else:
            base.update(_bytes_of(tensor).numpy().tobytes())
    if len({len(each) for each in rows}) != 1:
        raise ValueError(f"the inputs of the frozen layers are of {[len(each) for each in rows]} samples")
    keys = []
    for sample in zip(*rows):
        key = base.copy()
        for row in sample:
            key.update(row.tobytes())
        keys.append(key.digest())
    return keys


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def sum_of_weights(pieces: Iterable[Owned], names: frozenset[str]) -> int:
    """A number that adds up over all ranks, modulo 2^64, to the same under every plan; to another if weights change.

    Args:
        names: of the parameters and buffers that count.
    """
    total = 0
    for piece in pieces:
        if not piece.primary or names.isdisjoint((piece.name, *piece.aliases)):
            continue
        name = min((piece.name, *piece.aliases))
        factor = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1
        tensor = piece.tensor.detach().contiguous()
        integers = tensor.view(_INTEGERS[tensor.element_size()]) if tensor.dtype != torch.bool else tensor
        total += int(integers.sum(dtype=torch.int64)) * factor
    return total % _MODULUS
