"""Initial weights of a model built on the meta device, one module at a time."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from passes.torch_compat.module_tables import buffers_of, parameters_of, tensors_of
from runtime.torch_compat.model_internals import initialiser_of_model, initialiser_of_module


def initialised_tensors(model: nn.Module, *, seed: int, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and whole value of the parameters and buffers in ``names``, as the model's own code initialises them.

    A module's ``reset_parameters`` is called, then the model's ``_init_weights`` (Hugging Face), each module from
    its own seed. Only one module is in memory at a time. What neither of them fills is left out.
    """
    initialise = initialiser_of_model(model)
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        module_tensors = tensors_of(module)
        requested = [name for name, tensor in module_tensors.items() if tensor is not None and prefix + name in names]
        if not requested:
            continue
        real = _initialised(module, path, initialise, seed=seed, before=0)
        # Numbers that show what was not filled; other dtypes have none that could not be meant.
        floating = all(getattr(real, name).is_floating_point() for name in requested)
        other = real if floating else _initialised(module, path, initialise, seed=seed, before=1)
        for name in requested:
            tensor = getattr(real, name).detach()
            unfilled = tensor.isnan().any() if floating else not torch.equal(tensor, getattr(other, name))
            if not unfilled:
                yield prefix + name, tensor


def _initialised(module: nn.Module, path: str, initialise: Any, *, seed: int, before: int) -> nn.Module:
    real = _materialised(module, before)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed_for(path, seed))
        _fill(real, initialise)
    return real


def _materialised(module: nn.Module, before: int) -> nn.Module:
    """A copy of one module, without its children, on the CPU: full of NaN, and of ``before`` where there is none."""
    memo: dict[int, Any] = {id(child): child for child in module.children()}
    copied = copy.deepcopy(module, memo)
    owners: tuple[dict[str, Any], ...] = (parameters_of(copied), buffers_of(copied))
    for tensors in owners:
        for name, tensor in tensors.items():
            if tensor is not None and tensor.is_meta:
                filling = float("nan") if tensor.is_floating_point() else before
                real: torch.Tensor = torch.full_like(tensor, filling, device="cpu")
                if isinstance(tensor, nn.Parameter):
                    real = nn.Parameter(real, requires_grad=tensor.requires_grad)
                tensors[name] = real
    return copied


def _fill(module: nn.Module, initialise: Any) -> None:
    reset = initialiser_of_module(module)
    if reset is not None:
        reset()
    if initialise is not None:
        initialise(module)


def still_on_meta(names: Sequence[str], state_names: Collection[str]) -> str:
    """What to do about tensors that have no data, of a model whose state dict has ``state_names``."""
    shown = ", ".join(repr(name) for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    if not set(names) & set(state_names):
        return (
            f"{shown}{more} still on the meta device: a buffer outside of the state dict, which no file holds and "
            "neither reset_parameters() of its module nor _init_weights(module) of the model computes; give its value: "
            f"load_full_state_dict({{{names[0]!r}: value}}, strict=False)"
        )
    return (
        f"{shown}{more} still on the meta device: call load_pretrained(...), load_full_state_dict(...) or "
        "initialise(seed=...) first (initialise fills what reset_parameters() of a module or _init_weights(module) of "
        "the model does)"
    )


def seed_for(name: str, seed: int) -> int:
    """A seed for one module: the same on every rank and mesh."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")
