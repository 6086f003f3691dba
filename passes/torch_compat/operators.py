"""Operators as torch's registry has them, and looking at every one that is called."""

from __future__ import annotations

from typing import Any

from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "overload_name",
    "schema",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]


def schema(operator: Any) -> Any:
    """The schema of an operator; None for what is none."""
    return getattr(operator, "_schema", None)


def overload_name(operator: OpOverload) -> str:
    """``"Tensor"`` for ``aten.add.Tensor``, ``""`` for the default one."""
    return operator._overloadname
