"""Python values as JSON and tensors, and back: plain data only, so that reading them can run nothing.

JSON has no tuples, no tensors, and names alone as keys. What it lacks is an object of one entry whose name begins with
``$``: ``{"$tuple": [1, 2]}``, ``{"$tensor": 0}`` (the number of a tensor that is stored beside).
"""

from __future__ import annotations

import base64
import binascii
import collections
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

#: Deeper data is a cycle, or meant to exhaust the stack.
MAX_DEPTH = 100
_SCALARS = (type(None), bool, int, float, str)
#: Containers of pairs, and of items, beside ``dict`` and ``list``.
_OF_PAIRS: Mapping[str, Callable[[Any], Any]] = {
    "$dict": dict,
    "$counter": lambda pairs: collections.Counter(dict(pairs)),
    "$ordered": collections.OrderedDict,
}
_OF_ITEMS: Mapping[str, Callable[[Any], Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
_TAGS: Mapping[Any, str] = {
    dict: "$dict", collections.Counter: "$counter", collections.OrderedDict: "$ordered", tuple: "$tuple",
    torch.Size: "$tuple", set: "$set", frozenset: "$frozenset",
}  # fmt: skip


@dataclass(frozen=True)
class Encoded:
    """A value as JSON text, and the tensors in it by number."""

    text: str
    tensors: tuple[torch.Tensor, ...]


def encode(value: Any, *, where: str) -> Encoded:
    """``value`` as plain data; ``where`` names it in errors. Numbers of NumPy become Python's.

    Raises:
        ValueError: naming the place of the first thing that is not plain data, and what would be.
    """
    tensors: list[torch.Tensor] = []
    return Encoded(json.dumps(_encoded(value, where, 0, tensors)), tuple(tensors))


def _encoded(value: Any, where: str, depth: int, tensors: list[torch.Tensor]) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"{where[:200]} is nested more than {MAX_DEPTH} deep, or contains itself")
    if type(value) in _SCALARS:
        return value
    if isinstance(value, numpy.generic) and isinstance(value.item(), _SCALARS):
        return value.item()
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(value.copy())
        return {"$array": _number_of(value, tensors)}
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return {"$tensor": _number_of(value, tensors)}
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if type(value) is list:
        return [_encoded(item, f"{where}[{index}]", depth + 1, tensors) for index, item in enumerate(value)]
    tag = _TAGS.get(type(value), "")
    if tag in _OF_ITEMS:
        items = [_encoded(item, f"{where}[{index}]", depth + 1, tensors) for index, item in enumerate(value)]
        return {tag: items}
    if tag in _OF_PAIRS:
        return _encoded_pairs(value, tag, where, depth, tensors)
    raise ValueError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}: only plain data can be stored (numbers, "
        "texts, None, lists, tuples, dicts, sets, bytes, arrays and tensors), so that loading it runs no code; store "
        "what it is made from"
    )


def _encoded_pairs(value: Any, tag: str, where: str, depth: int, tensors: list[torch.Tensor]) -> Any:
    keys = [_encoded(key, f"a key of {where}", depth + 1, tensors) for key in value]
    items = [_encoded(item, f"{where}[{key!r}]", depth + 1, tensors) for key, item in value.items()]
    named = all(type(key) is str and not key.startswith("$") for key in value)
    return dict(zip(keys, items)) if tag == "$dict" and named else {tag: [list(pair) for pair in zip(keys, items)]}


def _number_of(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> int:
    tensors.append(tensor.detach())
    return len(tensors) - 1


def decode(data: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The value of what the JSON of ``encode`` says.

    Raises:
        ValueError: for data that ``encode`` does not write.
    """
    return _decoded(data, tensors, 0)


def _decoded(data: Any, tensors: Sequence[torch.Tensor], depth: int) -> Any:
    if depth > 2 * MAX_DEPTH:
        raise ValueError("its brackets are nested too deep")
    if isinstance(data, list):
        return [_decoded(item, tensors, depth + 1) for item in data]
    if not isinstance(data, dict):
        return data
    tag = next(iter(data), "")
    if len(data) != 1 or not tag.startswith("$"):
        return {key: _decoded(item, tensors, depth + 1) for key, item in data.items()}
    try:
        return _decoded_tag(tag, data[tag], tensors, depth)
    except (TypeError, KeyError, IndexError, binascii.Error) as error:
        raise ValueError(f"it has an entry {tag!r} that cannot be read ({error})") from error


def _decoded_tag(tag: str, content: Any, tensors: Sequence[torch.Tensor], depth: int) -> Any:
    if tag in ("$tensor", "$array"):
        if not isinstance(content, int) or not 0 <= content < len(tensors):
            raise ValueError(f"it names a tensor {str(content)[:20]} that is not there")
        return tensors[content] if tag == "$tensor" else tensors[content].numpy()
    if tag == "$bytes":
        return base64.b64decode(content, validate=True)
    if tag in _OF_ITEMS:
        return _OF_ITEMS[tag](_decoded(item, tensors, depth + 1) for item in content)
    pairs = [(_decoded(key, tensors, depth + 1), _decoded(item, tensors, depth + 1)) for key, item in content]
    return _OF_PAIRS[tag](pairs)
