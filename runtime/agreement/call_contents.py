"""What a call passes, as ranks tell each other: in words that are the same in every process, by shapes, by digests."""

from __future__ import annotations

import hashlib
import pickle
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from passes.capture.nested_values import Container, Leaf, Structure, flatten, leaf_paths, rebuild
from runtime.calls.model_call import ModelCall, Path


@dataclass(frozen=True)
class Argument:
    """One argument without its tensors' values. ``structure`` is pickled; None if that cannot be."""

    text: str
    shapes: Mapping[Path, tuple[tuple[int, ...], torch.dtype, bool]]
    structure: bytes | None


def arguments_of(call: ModelCall) -> dict[int | str, Argument]:
    """The arguments of a call by place or name."""
    arguments: dict[int | str, Argument] = {}
    for structure in call.structures:
        assert isinstance(structure, Container)
        for name, part in zip(structure.keys, structure.parts):
            tensors = {path: call.tensors[path] for path in leaf_paths(part)}
            shapes = {path: (tuple(one.shape), one.dtype, one.requires_grad) for path, one in tensors.items()}
            arguments[name] = Argument(_text(part, shapes), shapes, _pickled(part))
    return arguments


def _text(structure: Structure, shapes: Mapping[Path, tuple[tuple[int, ...], torch.dtype, bool]]) -> str:
    tensors = [
        f"{'.'.join(map(str, path[1:]))}{' ' if path[1:] else ''}{list(shape)} {str(dtype).removeprefix('torch.')}"
        f"{' with a gradient' if with_gradient else ''}"
        for path, (shape, dtype, with_gradient) in shapes.items()
    ]
    if len(shapes) == 1 and not isinstance(structure, Container):
        return tensors[0]
    return f"{'; '.join(tensors)} in {in_words(structure)}" if tensors else in_words(structure)


def in_words(structure: Structure) -> str:
    """A structure in words that are the same in every process."""
    if isinstance(structure, Leaf):
        return "tensor"
    if isinstance(structure, Container):
        kind = structure.example if isinstance(structure.example, type) else type(structure.example)
        parts = [f"{key}={in_words(part)}" for key, part in zip(structure.keys, structure.parts)]
        return f"{kind.__name__}({', '.join(parts)})"
    value = structure.value
    if isinstance(value, np.ndarray):
        return f"array {list(value.shape)} {value.dtype} of checksum {zlib.crc32(np.ascontiguousarray(value).data):x}"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({', '.join(sorted(map(repr, value)))})"
    # Objects print their address, which is another one on each rank.
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _pickled(structure: Structure) -> bytes | None:
    try:
        return pickle.dumps(structure)
    except Exception:  # any object may stand in a call, and refuse in any way
        return None


def digest(tensor: torch.Tensor) -> int:
    if tensor.is_meta or tensor.layout is not torch.strided:
        return 0
    content = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(content.numpy().data)


def passed_together(
    own_call: ModelCall, action: str, by_rank: Sequence[Mapping[int | str, Argument]]
) -> tuple[int, ModelCall]:
    """What the ranks pass together, and its number: ``own_call`` itself if this rank passes all of it in that order."""
    arguments: dict[int | str, Argument] = {}
    for passed in by_rank:
        for name, argument in passed.items():
            arguments.setdefault(name, argument)
    text = repr([action, *((name, argument.text) for name, argument in arguments.items())])
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    if list(arguments_of(own_call)) == list(arguments):
        return number, own_call
    values = {name: _value(name, argument, own_call) for name, argument in arguments.items()}
    args = tuple(values[place] for place in sorted(name for name in values if isinstance(name, int)))
    kwargs = {name: value for name, value in values.items() if isinstance(name, str)}
    args_structure, tensors = flatten(args)
    kwargs_structure, more = flatten(kwargs)
    return number, ModelCall(args, kwargs, (args_structure, kwargs_structure), {**tensors, **more}).with_shapes({})


def _value(name: int | str, argument: Argument, own_call: ModelCall) -> Any:
    for passed in (dict(enumerate(own_call.args)), own_call.kwargs):
        if name in passed:
            return passed[name]  # type: ignore[index]
    assert argument.structure is not None
    tensors = {
        path: torch.empty(shape, dtype=dtype, device="meta", requires_grad=with_gradient)
        for path, (shape, dtype, with_gradient) in argument.shapes.items()
    }
    return rebuild(pickle.loads(argument.structure), tensors)
