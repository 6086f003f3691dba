"""Classes that pytrees take apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree


def take_apart_like(kind: type, original: type, as_original: Callable[[Any], Any]) -> None:
    """Let pytrees take objects of ``kind`` apart as those of ``original``, and put together objects of that.

    Args:
        as_original: gives an object of ``kind`` as one of ``original``.
    """
    node = pytree.SUPPORTED_NODES.get(original)
    if node is None:
        return
    with_keys = node.flatten_with_keys_fn
    pytree.register_pytree_node(
        kind,
        lambda value: node.flatten_fn(as_original(value)),
        node.unflatten_fn,
        flatten_with_keys_fn=None if with_keys is None else lambda value: with_keys(as_original(value)),
    )
