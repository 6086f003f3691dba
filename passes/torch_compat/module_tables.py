"""The tables in which ``nn.Module`` keeps tensors, modules and hooks; a change of one is a change of the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_of_torch

#: Names of the tables of content in a module's ``__dict__``.
CONTENT = ("_parameters", "_buffers", "_modules")
FORWARD_HOOKS = {"_forward_hooks": "forward hook", "_forward_pre_hooks": "forward pre-hook"}
#: Tables of backward hooks → the methods that fill them.
BACKWARD_HOOKS = {
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
}
HOOKS = (*FORWARD_HOOKS, *BACKWARD_HOOKS)
_UNSAVED = "_non_persistent_buffers_set"


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters by name."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own buffers by name."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules in a module by name, also if one has two names."""
    return module._modules


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own parameters and buffers by name."""
    return {**module._parameters, **module._buffers}


def hooks_of(module: nn.Module, table: str) -> dict[int, Any]:
    """The hooks in one of the tables ``HOOKS``."""
    hooks: dict[int, Any] | None = module.__dict__.get(table)
    return {} if hooks is None else hooks


def has_hooks(module: nn.Module) -> bool:
    """Whether something is called before or after the module's forward or backward."""
    return any(hooks_of(module, table) for table in HOOKS)


def hooks_of_all_modules() -> Iterator[Mapping[int, Any]]:
    """The tables of hooks that are called for every module of the process."""
    for kind in ("forward", "forward_pre", "backward", "backward_pre"):
        yield getattr(module_of_torch, f"_global_{kind}_hooks")


def leave_unsaved(module: nn.Module, buffer: str) -> None:
    """Keep one of the module's buffers out of its state dict."""
    module._non_persistent_buffers_set.add(buffer)


def share_content(module: nn.Module, source: nn.Module) -> None:
    """Let ``module`` have the very tables of ``source``: what one holds from now on, the other does."""
    for table in (*CONTENT, _UNSAVED):
        module.__dict__[table] = source.__dict__[table]


def convert_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> None:
    """What ``module.to`` and the like do: every tensor, and its gradient, as ``function`` gives it."""
    module._apply(function, recurse)
