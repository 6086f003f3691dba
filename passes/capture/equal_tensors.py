"""``torch.equal`` of floats that weights decide: true of what is computed alike.

A detector compares each layer's output with that of the last layer, whose student it is: no loss where both are one
tensor. Whether other floats are equal the program finds out (``other_branches``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes.torch_compat.tensor_fields import storage_id


def computed_alike(first: Any, second: Any) -> bool:
    """Whether two nodes are one tensor: the same part of one memory, or the same operator on operands that are.

    Nodes after which one of them was written to are taken for different by whoever asks.
    """
    pairs = [(first, second)]
    while pairs:
        one, other = pairs.pop()
        if isinstance(one, fx.Node) and isinstance(other, fx.Node):
            if one is other or _place(one) == _place(other) is not None:
                continue
            if one.op != "call_function" or one.target != other.target or one.kwargs != other.kwargs or _draws(one):
                return False
            one, other = one.args, other.args
        if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
            if len(one) != len(other):
                return False
            pairs += zip(one, other)
        elif type(one) is not type(other) or one != other:
            return False
    return True


def _place(node: fx.Node) -> tuple[Any, ...] | None:
    """The part of a memory that a node's tensor is."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return storage_id(value), value.storage_offset(), tuple(value.shape), value.stride(), value.dtype


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
