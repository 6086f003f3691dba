"""Nested inputs and outputs taken apart into tensors with a path each, and put together again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Path = tuple[str | int, ...]


@dataclass
class TrainingOutput:
    """What a model captured with a ``loss_fn`` returns: the loss and the model's own outputs."""

    loss: Any
    outputs: Any


@dataclass(frozen=True)
class Leaf:
    """A tensor at ``path``."""

    path: Path


@dataclass(frozen=True)
class LiteralLeaf:
    """Something that is not a tensor and holds none."""

    value: Any


@dataclass(frozen=True)
class Container:
    """A list, tuple, named tuple, mapping or dataclass: its class and its parts."""

    example: Any
    keys: tuple[str | int, ...]
    parts: tuple[Structure, ...]


Structure = Leaf | LiteralLeaf | Container


def flatten(value: Any, path: Path = ()) -> tuple[Structure, dict[Path, torch.Tensor]]:
    """Take ``value`` apart: its structure, and its tensors by path in order.

    An object that is none of tensor, sequence, mapping or dataclass is kept as a constant.
    """
    tensors: dict[Path, torch.Tensor] = {}
    return _structure(value, path, tensors), tensors


def rebuild(structure: Structure, tensors: Mapping[Path, Any]) -> Any:
    """Put together what ``flatten`` took apart, with other tensors."""
    if isinstance(structure, Leaf):
        return tensors[structure.path]
    if isinstance(structure, LiteralLeaf):
        return structure.value
    parts = [rebuild(part, tensors) for part in structure.parts]
    return _make(structure.example, structure.keys, parts)


def constants_of(structure: Structure) -> Iterator[Any]:
    """What is no tensor, in order."""
    return (leaf.value for leaf in _leaves(structure) if isinstance(leaf, LiteralLeaf))


def leaf_paths(structure: Structure) -> Iterator[Path]:
    """Paths of the tensors, in order."""
    return (leaf.path for leaf in _leaves(structure) if isinstance(leaf, Leaf))


def _leaves(structure: Structure) -> Iterator[Leaf | LiteralLeaf]:
    if isinstance(structure, Container):
        for part in structure.parts:
            yield from _leaves(part)
    else:
        yield structure


def _structure(value: Any, path: Path, tensors: dict[Path, torch.Tensor]) -> Structure:
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return Leaf(path)
    items = _items(value)
    if items is None:
        return LiteralLeaf(value)
    parts = tuple(_structure(part, (*path, key), tensors) for key, part in items)
    return Container(_empty(value), tuple(key for key, _ in items), parts)


def _items(value: Any) -> list[tuple[str | int, Any]] | None:
    if type(value) is dict or isinstance(value, Mapping):  # The former is asked ten times as fast.
        return list(value.items())
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        names = getattr(type(value), "_fields", range(len(value)))
        return list(zip(names, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _empty(value: Any) -> Any:
    """What ``_make`` needs of a container: its class, or an empty copy of a dataclass."""
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        blank = copy.copy(value)
        for field in dataclasses.fields(value):  # type: ignore[arg-type]
            object.__setattr__(blank, field.name, None)
        return blank
    return type(value)


def _make(example: Any, keys: tuple[str | int, ...], parts: list[Any]) -> Any:
    if not isinstance(example, type):
        instance = copy.copy(example)
        for key, part in zip(keys, parts):
            object.__setattr__(instance, str(key), part)
        return instance
    if issubclass(example, Mapping):
        fields = dict(zip(keys, parts))
        return example(**fields) if dataclasses.is_dataclass(example) else _mapping(example, fields)
    constructor: Any = example
    return constructor(*parts) if hasattr(example, "_fields") else constructor(parts)


def _mapping(cls: Any, fields: dict[Any, Any]) -> Any:
    """A mapping of class ``cls`` if it can be made from a dict, else a dict (``defaultdict`` and the like)."""
    try:
        return cls(fields)
    except TypeError:
        return fields
