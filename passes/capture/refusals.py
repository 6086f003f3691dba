"""What a model must not be or have, told before it is traced: its program would not do what the model does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from passes.capture.nested_values import Path
from passes.ir.errors import CaptureError
from passes.torch_compat.module_tables import BACKWARD_HOOKS, hooks_of, hooks_of_all_modules
from passes.torch_compat.tensor_fields import gradient_hooks

_Reasons = Iterator[str]


def refuse_unsupported(model: Any) -> None:
    """Raise if ``model`` cannot be planned for, whatever its forward does.

    Raises:
        CaptureError: in one line, naming the module or the parameter and what to do.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"a model must be a torch.nn.Module, not {_what(model)}")
    reason = next(_reasons(model), None)
    if reason is not None:
        raise CaptureError(f"cannot capture {type(model).__name__}: {reason}")


def refuse_inputs(tensors: Mapping[Any, torch.Tensor]) -> None:
    """Raise CaptureError for an input that is no plain strided tensor, or named as another; ``tensors`` are by path."""
    names_of_paths(tensors, "inputs")
    for path, tensor in tensors.items():
        kind = _unusual(tensor)
        if kind is not None:
            name = ".".join(map(str, path))
            raise CaptureError(f"input {name!r} is a {kind} tensor, which cannot be sharded: pass a dense one")


def names_of_paths(paths: Iterable[Path], of: str) -> dict[Path, str]:
    """The keys of each path joined with dots, by path.

    Raises:
        CaptureError: if two paths have the same name (``{"a.b": x, "a": {"b": y}}``).
    """
    by_name: dict[str, Path] = {}
    for path in paths:
        name = ".".join(map(str, path))
        if name in by_name:
            raise CaptureError(
                f"two {of}, at {list(by_name[name])} and at {list(path)}, are both {name!r} by their keys joined with "
                "dots: rename a key"
            )
        by_name[name] = path
    return {path: name for name, path in by_name.items()}


def _reasons(model: nn.Module) -> _Reasons:
    modules = list(model.named_modules())
    for path, module in modules:
        for refuse in (_wrapper, _quantized_module, _backward_hooks):
            reason = refuse(module)
            if reason is not None:
                yield f"module {path!r} ({type(module).__name__}) {reason}"
    yield from _global_hooks()
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        reason = _tensor_reason(tensor)
        if reason is not None:
            yield f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {name!r} {reason}"


#: Classes of torch that run a model in parallel themselves.
_WRAPPERS = {
    "DistributedDataParallel": "pass what it wraps (model.module)",
    "DataParallel": "pass what it wraps (model.module)",
    "FullyShardedDataParallel": "pass the model before FSDP",
    "FSDPModule": "pass the model before fully_shard",
}


def _wrapper(module: nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "is compiled by torch.jit, which hides its operators: pass the nn.Module that it was made from"
    for kind in type(module).__mro__:
        advice = _WRAPPERS.get(kind.__name__)
        if advice is not None and kind.__module__.startswith("torch."):
            return f"is parallel already ({kind.__name__}): {advice}"
    return None


_QUANTIZED_PACKAGES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "bitsandbytes.", "torchao.")


def _quantized_module(module: nn.Module) -> str | None:
    if type(module).__module__.startswith(_QUANTIZED_PACKAGES):
        return "is quantized: its weights are no parameters that can be sharded; pass the model in a float dtype"
    return None


def _backward_hooks(module: nn.Module) -> str | None:
    for table, method in BACKWARD_HOOKS.items():
        hooks = hooks_of(module, table)
        if hooks:
            return (
                f"has a backward hook ({method}: {_names(hooks)}), which the program would not call: remove it, or "
                "change the gradient with an operator in forward"
            )
    return None


def _global_hooks() -> _Reasons:
    for hooks in hooks_of_all_modules():
        if hooks:
            yield (
                f"a hook is registered on all modules ({_names(hooks)}), also on those that tracing makes: remove it, "
                "or register it on the modules that it is for"
            )


def hook_of(tensor: torch.Tensor) -> str | None:
    """``method: name`` of the hooks on a parameter's gradient; None if it has none."""
    named = (f"{method}: {_names(hooks)}" for method, hooks in gradient_hooks(tensor).items())
    return next(named, None)


def _tensor_reason(tensor: torch.Tensor) -> str | None:
    hook = hook_of(tensor)
    if hook is not None:
        return (
            f"has a hook on its gradient ({hook}), which would see a shard of it at most: remove the hook, and change "
            "the gradients after train_step (parallel.parameters())"
        )
    if torch.nn.parameter.is_lazy(tensor):
        return "has no shape yet: call the model once before it is planned"
    kind = _unusual(tensor)
    return None if kind is None else f"is a {kind} tensor, which cannot be sharded: pass the model with dense ones"


def _unusual(tensor: torch.Tensor) -> str | None:
    """What keeps a tensor from being cut along its dims: its layout, its dtype, its class."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.").replace("_", " ")
    if tensor.is_quantized:
        return "quantized"
    if type(tensor).__module__.startswith(("torch.distributed.tensor", "torchao.", "bitsandbytes.")):
        return f"distributed or quantized ({type(tensor).__name__})"
    return None


def _names(hooks: Mapping[Any, Callable[..., Any]] | Iterable[Callable[..., Any]]) -> str:
    entries = hooks.values() if isinstance(hooks, Mapping) else hooks
    return ", ".join(str(getattr(hook, "__qualname__", type(hook).__name__)) for hook in entries)


def _what(thing: Any) -> str:
    return "None" if thing is None else f"a {type(thing).__name__}" if not isinstance(thing, type) else thing.__name__


def first_read(program: ExportedProgram) -> str | None:
    """Where a tensor's value becomes a Python number or a shape, or a branch is taken on it, if anywhere."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            stack = list(node.meta.get("nn_module_stack", {}).values())
            place = stack[-1][0].removeprefix("model").removeprefix(".") if stack else ""
            lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
            where = f", {' '.join(lines[-2:])}" if lines else ""
            return (
                f"in module {place!r}{where}: {node.target} makes a number or a shape out of a tensor's values, "
                "which are not known when planning: use tensor operations of static shape"
            )
    return None
