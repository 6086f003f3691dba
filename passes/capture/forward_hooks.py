"""Forward hooks are traced with the module they are on; those that only look on are not called again, which is said."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from passes.torch_compat.module_tables import CONTENT, FORWARD_HOOKS, hooks_of
from passes.torch_compat.operators import tree_leaves
from passes.torch_compat.tensor_fields import DisableTorchFunction, versions

#: Packages whose models read in the same forward what their hooks collect, and that of what generation notes itself.
_READ_BACK = ("transformers.", "runtime.")


@contextlib.contextmanager
def announced_hooks(model: nn.Module) -> Iterator[None]:
    """Warn after the block of every forward hook that was called in it and changed nothing that was traced.

    The hooks of ``model``, which is a copy made for the trace, are replaced by ones that note their calls.
    """
    effects: dict[str, bool] = {}
    for path, module in model.named_modules():
        for table, kind in FORWARD_HOOKS.items():
            hooks = hooks_of(module, table)
            for key, hook in list(hooks.items()):
                if not getattr(hook, "__module__", "").startswith(_READ_BACK):
                    name = getattr(hook, "__qualname__", type(hook).__name__)
                    hooks[key] = _noting(hook, f"{kind} {name!r} on module {path!r}", effects)
    yield
    for name, has_effect in effects.items():
        if not has_effect:
            warnings.warn(
                f"the {name} changes nothing in the model's graph: it was called while tracing, and the program does "
                "not call it again (its side effects happen once, on tensors without data)",
                stacklevel=2,
            )


def _noting(hook: Callable[..., Any], name: str, effects: dict[str, bool]) -> Callable[..., Any]:
    """``hook``, noting under ``name`` whether a call of it did anything to the module or its tensors."""

    @functools.wraps(hook)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = _contents(module, (args, kwargs))
        result = hook(module, *args, **kwargs)
        has_effect = result is not None or before != _contents(module, (args, kwargs))
        effects[name] = effects.get(name, False) or has_effect
        return result

    return call


def _contents(module: nn.Module, tree: Any) -> tuple[Any, ...]:
    owners = (module.__dict__, *(module.__dict__[table] for table in CONTENT))
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    with DisableTorchFunction():
        needs = [tensor.requires_grad for tensor in tensors]
    return [tuple((name, id(entry)) for name, entry in owner.items()) for owner in owners], versions(tensors), needs
