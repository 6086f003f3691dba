"""The module whose ``generate`` runs: the model itself or, of a PEFT model, the base model that its adapters are in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from runtime.weight_files.peft_adapters import has_adapters

OTHERWISE = "generate(gathered=True) gathers the weights and generates with the whole model"
#: Arguments of PEFT's ``generate`` by which rows of a batch have adapters of their own, set by hooks.
_BY_ROW = ("adapter_names", "alora_offsets")


def generating_part(model: nn.Module) -> nn.Module:
    """The module in ``model`` that generation calls.

    Raises:
        ValueError: for adapters that change more than the modules that they are in.
    """
    if not has_adapters(model):
        return model
    adapted: Any = model
    _refuse_adapters(adapted, adapted.peft_config.values())
    base: nn.Module = adapted.get_base_model()
    return base


def generating_path(model: nn.Module) -> str:
    """The path of ``generating_part`` in ``model``."""
    part = generating_part(model)
    return next(path for path, module in model.named_modules() if module is part)


def refuse_adapters_by_row(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of PEFT's ``generate`` that a program of all rows does not take."""
    for name in _BY_ROW:
        if arguments.get(name) is not None:
            raise ValueError(f"{name} gives rows adapters of their own, and a program has one for all: {OTHERWISE}")


def _refuse_adapters(model: Any, configs: Iterable[Any]) -> None:
    for config in configs:
        kind = getattr(config.peft_type, "value", config.peft_type)
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise ValueError(f"{kind} brings tokens of its own, of which a sharded cache knows nothing: {OTHERWISE}")
        if getattr(config, "alora_invocation_tokens", None):
            raise ValueError(f"alora_invocation_tokens switch {kind} on within a row: {OTHERWISE}")
    if hasattr(type(model.base_model), "generate"):
        raise ValueError(f"{type(model.base_model).__name__} generates in a way of its own: {OTHERWISE}")
