"""Check that all ranks compile the same model, plan and arguments with the same versions, before planning."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cost_models.registrations import registrations_in_words
from passes.capture.nested_values import flatten
from passes.plan import Plan
from runtime.agreement.call_contents import in_words
from runtime.agreement.ranks_together import Ranks
from runtime.launch.groups import mesh_of_axes
from runtime.launch.place import find_place
from runtime.launch.process import init


def ranks_of(target: Any, numbers: Sequence[int] | None = None) -> Ranks:
    """The ranks that compile together: those of a device mesh, else ``numbers``, else all of the default process group,
    which is joined.
    """
    if isinstance(target, DeviceMesh):
        is_usable = target.mesh_dim_names and target.get_coordinate() is not None
        return Ranks.of(target) if is_usable else Ranks(None)
    if numbers is not None:
        device = init().device.type
        return Ranks.of(mesh_of_axes(device, torch.tensor(list(numbers), device="cpu"), ("ranks",)))
    if not dist.is_initialized():
        if find_place(os.environ).world_size == 1:
            return Ranks(None)
        init()
    return Ranks(dist.group.WORLD)


def check_compiled_alike(
    ranks: Ranks, model: nn.Module, *, target: Any, plan: Plan | None, loss_fn: Any, options: Mapping[str, Any]
) -> None:
    """Compare what the ranks pass to ``compile``; weights are not compared, as the first rank's count.

    Raises:
        ValueError: on every rank, if they differ: which ranks, and in what.
    """
    if ranks.is_alone:
        return
    shown = f"{target.mesh_dim_names} over {target.mesh.tolist()}" if isinstance(target, DeviceMesh) else None
    facts = {
        "versions": f"torch {torch.__version__}\nmeshwright {_version()}\nPython {platform.python_version()}",
        f"the {type(model).__name__}": structure_of(model),
        "the mesh": shown or (target.to_json() if isinstance(target, Plan) else str(target)),
        "the plan": "none" if plan is None else plan.to_json(),
        "loss_fn": f"{getattr(loss_fn, '__module__', None)}.{getattr(loss_fn, '__qualname__', type(loss_fn).__name__)}",
        "what is registered": "\n".join(f"{kind}: {words}" for kind, words in registrations_in_words().items()),
        **{f"option {name}": option_in_words(value) for name, value in sorted(options.items())},
    }
    names = sorted(facts)
    ranks.check_alike({"the names of the model's class or the options": "\n".join(names)})
    ranks.check_alike(facts)


def _version() -> str:
    try:
        return version("meshwright")
    except PackageNotFoundError:  # run from its source
        return "not installed"


def structure_of(model: nn.Module) -> str:
    """Modules and tensors of a model, in words."""
    modules = (
        f"module {name!r}: {type(module).__name__}{'' if module.training else ' in evaluation mode'}"
        for name, module in model.named_modules()
    )
    tensors = (
        f"{name!r}: {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        f"{'' if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ' frozen'}"
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    )
    return "\n".join((*modules, *tensors))


def option_in_words(value: Any) -> str:
    """An option, with the shapes of the tensors in it."""
    structure, tensors = flatten(value)
    shapes = [f"{'.'.join(map(str, path))} {list(tensor.shape)} {tensor.dtype}" for path, tensor in tensors.items()]
    return "\n".join((*shapes, in_words(structure)))
