"""Initial weights of a model built on the meta device, one module at a time."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def initialised_tensors(model: nn.Module, *, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and whole value of every parameter and buffer, as the model's own code initialises them.

    A module's ``reset_parameters`` is called, then the model's ``_init_weights`` (Hugging Face), each module from
    its own seed. Only one module is in memory at a time.

    Raises:
        ValueError: for a module that has tensors but neither way to initialise them.
    """
    initialise = getattr(model, "_init_weights", None)
    for path, module in model.named_modules():
        own = [*module._parameters.items(), *module._buffers.items()]
        if not any(tensor is not None for _, tensor in own):
            continue
        real = _materialised(module)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed_for(path, seed))
            _fill(real, path, initialise)
        prefix = f"{path}." if path else ""
        for name, _ in own:
            tensor = getattr(real, name)
            if tensor is not None:
                yield prefix + name, tensor.detach()


def _materialised(module: nn.Module) -> nn.Module:
    """A copy of one module, without its children, on the CPU."""
    memo: dict[int, Any] = {id(child): child for child in module.children()}
    copied = copy.deepcopy(module, memo)
    copied._modules = dict(module._modules)
    for tensors in (copied._parameters, copied._buffers):
        for name, tensor in tensors.items():
            if tensor is not None and tensor.is_meta:
                real: torch.Tensor = torch.empty_like(tensor, device="cpu")
                if isinstance(tensor, nn.Parameter):
                    real = nn.Parameter(real, requires_grad=tensor.requires_grad)
                tensors[name] = real  # type: ignore[assignment]
    return copied


def _fill(module: nn.Module, path: str, initialise: Any) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None:
        reset()
    if initialise is not None:
        initialise(module)
    elif reset is None:
        raise ValueError(
            f"module {path or 'the model itself'!r} ({type(module).__name__}) has no reset_parameters() and the model "
            "no _init_weights(module): load its weights with load_full_state_dict(...)"
        )


def seed_for(name: str, seed: int) -> int:
    """A seed for one module: the same on every rank and mesh."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")
