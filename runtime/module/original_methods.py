"""Methods of the original's class, called on a parallel module: they run on the copy without data.

Settings that they read are there. What they give of the copy (parameters, modules, optimizers over them) is given as
users see it, and what they freeze or put into another mode is so here, too. What would be lost, as the copy has neither
values nor gradients, is refused.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from passes.torch_compat.operators import TorchDispatchMode, schema, tree_leaves
from runtime.parameters.whole_tensors import written_tensors


def method_of_original(method: Callable[..., Any], model: nn.Module, parallel: nn.Module) -> Callable[..., Any]:
    """``method``, bound to the copy ``model``, as one of ``parallel``.

    The method that is returned raises ValueError where it computes with weights, reads gradients or writes to weights.
    """
    name = getattr(method, "__name__", "")
    kind = type(model).__name__
    computes = (
        f"{name} computes with weights, and a parallel module runs forward alone: let forward do what {name} does "
        "(behind an argument, say, with an example of such a call), and call the module"
    )

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = _FreezingAndModes(model)
        tensors = [*model.parameters(), *model.buffers()]
        not_computed = {id(one) for one in (*tree_leaves((args, kwargs)), *tensors)}
        refusal = (
            f"{name} {{}}, which the model behind a parallel module does not have: call {kind}.{name}(parallel, …) "
            "with the parallel module in the place of self"
        )
        try:
            with _Attributes(tensors, refusal), _Writes(tensors, refusal):
                result = method(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error):
                raise
            raise ValueError(computes) from error
        finally:
            before.hand_over_changes(parallel)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_meta and id(leaf) not in not_computed:
                raise ValueError(computes)
        return shown_for(result, model, parallel)

    return call


def property_of_original(name: str, model: nn.Module, parallel: nn.Module) -> Any:
    """The value of a property of the model's class, as a method without arguments gives it."""
    getter = getattr(type(model), name).fget
    return method_of_original(types.MethodType(getter, model), model, parallel)()


def shown_for(value: Any, model: nn.Module, parallel: nn.Module) -> Any:
    """``value`` with what users see of ``parallel`` in the place of modules and parameters of ``model``.

    A list, tuple or dictionary that has none of these is given itself: its owner sees what is written to it. Of a
    pipeline, lists and optimizers lose the parameters of other stages.
    """
    modules = {id(module): path for path, module in model.named_modules()}
    names = {id(one): name for name, one in model.named_parameters()}
    here = dict(parallel.named_parameters(remove_duplicate=False))

    def is_elsewhere(one: Any) -> bool:
        return isinstance(one, nn.Parameter) and id(one) in names and names[id(one)] not in here

    def shown(one: Any) -> Any:
        if isinstance(one, nn.Module) and id(one) in modules:
            return parallel.get_submodule(modules[id(one)])
        if isinstance(one, nn.Parameter) and id(one) in names:
            return parallel.get_parameter(names[id(one)])
        if isinstance(one, torch.optim.Optimizer):
            for group in one.param_groups:
                group["params"] = [shown(entry) for entry in group["params"] if not is_elsewhere(entry)]
            return one
        if type(one) in (list, tuple):
            entries = [shown(entry) for entry in one if not is_elsewhere(entry)]
            return one if list(map(id, entries)) == list(map(id, one)) else type(one)(entries)
        if type(one) is dict:
            items = {key: shown(entry) for key, entry in one.items() if not is_elsewhere(entry)}
            return one if list(map(id, items.values())) == list(map(id, one.values())) else items
        return (shown(entry) for entry in one if not is_elsewhere(entry)) if isinstance(one, Iterator) else one

    return shown(value)


class _FreezingAndModes:
    """How a model's parts are frozen, and their modes, before a method of it runs."""

    def __init__(self, model: nn.Module) -> None:
        self._modes = [(path, module, module.training) for path, module in model.named_modules()]
        self._trained = [(name, one, one.requires_grad) for name, one in model.named_parameters()]

    def hand_over_changes(self, parallel: nn.Module) -> None:
        """Let ``parallel`` have what has changed since, and the model be as it was."""
        here = dict(parallel.named_parameters(remove_duplicate=False))
        for name, parameter, before in self._trained:
            after = parameter.requires_grad
            if after != before:
                parameter.requires_grad_(before)
                if name in here:
                    here[name].requires_grad_(after)
        for path, module, before in self._modes:
            if module.training != before:
                parallel.get_submodule(path).training = module.training
                module.training = before


class _Attributes(TorchFunctionMode):
    """Inside, gradients of ``tensors`` are not read, nor is their data replaced."""

    def __init__(self, tensors: list[torch.Tensor], refusal: str) -> None:
        super().__init__()
        self._of_model, self._refusal = set(map(id, tensors)), refusal

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        access = getattr(func, "__name__", "")
        if access in ("__get__", "__set__") and id(args[0]) in self._of_model:
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if attribute == "grad":
                raise ValueError(self._refusal.format("uses gradients"))
            if attribute == "data" and access == "__set__":
                raise ValueError(self._refusal.format("replaces values of weights"))
        return func(*args, **(kwargs or {}))


class _Writes(TorchDispatchMode):
    """Inside, nothing is written to memory of ``tensors``."""

    def __init__(self, tensors: list[torch.Tensor], refusal: str) -> None:
        super().__init__()
        self._of_model, self._refusal = set(map(_storage, tensors)), refusal

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if schema(func).is_mutable:
            written = {_storage(one) for one in written_tensors(func, args, kwargs) if one.is_meta}
            if not written.isdisjoint(self._of_model):
                raise ValueError(self._refusal.format("writes to weights"))
        return func(*args, **kwargs)


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
