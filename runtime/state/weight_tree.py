"""The parameters and buffers that a rank holds, as a tree of modules with the original names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from passes.torch_compat.module_tables import buffers_of, children_of, leave_unsaved, parameters_of


def refuse_hook(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What registers a hook on a module that holds weights alone."""
    raise ValueError(
        "a hook here would never be called: this holds weights alone, the program calls no modules; register "
        "forward hooks on the model before planner.compile"
    )


class WeightTree(nn.Module):
    """A node of the tree: ``w.model.layers[0].mlp.up_proj.weight``; lists also slice and iterate.

    A slice is by index, not by position: ``w.net[0:4:2]`` is ``net.0`` and ``net.2`` whether or not ``net.1`` holds
    anything.
    """

    #: Number of copies of a repeated block that checks visit (None: all).
    max_copies: int | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("weights are data: call the parallel module they belong to")

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (bool, int, float, str)) and name not in ("training", "max_copies") and name[:1] != "_":
            raise ValueError(
                f"setting {name!r} here would change nothing: this holds weights alone; set it on the model's own "
                "module (the next call sees that), or before planner.compile"
            )
        super().__setattr__(name, value)

    register_forward_hook = register_forward_pre_hook = refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = refuse_hook

    def __getitem__(self, key: int | str | slice) -> Any:
        if isinstance(key, slice):
            indices = range(key.start or 0, key.stop, key.step or 1)
            return [self[index] for index in indices[: self.max_copies]]
        if isinstance(key, int) and not hasattr(self, str(key)):
            return type(self)()  # a list entry without weights (an activation between two linears)
        return getattr(self, str(key))

    def __iter__(self) -> Iterator[Any]:
        return iter([child for name, child in self.named_children() if name.isdigit()])

    def __len__(self) -> int:
        return sum(name.isdigit() for name in children_of(self))

    def put(self, path: str, tensor: torch.Tensor | None, *, persistent: bool = True) -> None:
        """Place a parameter or buffer at ``path``, making the modules on the way."""
        parent, _, name = path.rpartition(".")
        node = self.node(parent)
        if isinstance(tensor, nn.Parameter):
            parameters_of(node)[name] = tensor
        else:
            buffers_of(node)[name] = tensor
            if not persistent:
                leave_unsaved(node, name)

    def node(self, path: str) -> WeightTree:
        """The module at ``path`` ("" for this one), made with those on the way if it is not there."""
        node = self
        for name in path.split(".") if path else ():
            child = children_of(node).get(name)
            if child is None:
                child = type(self)()
                child.max_copies = self.max_copies
                children_of(node)[name] = child
            node = child  # type: ignore[assignment]
        return node

    def look_up_at_once(self) -> None:
        """Let Python find what is held as plain attributes, not by ``nn.Module``'s search, which a block repeats."""
        for node in self.modules():
            node.__dict__.update({**children_of(node), **buffers_of(node)})

    def find(self, path: str) -> Any:
        """The tensor or list at ``path``."""
        node: Any = self
        for part in path.split("."):
            node = node[part]
        return node
