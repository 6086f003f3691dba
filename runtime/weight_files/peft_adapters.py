"""Adapters of PEFT models in PEFT's own files: ``adapter_model.safetensors`` beside ``adapter_config.json``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.agreement.ranks_together import rank_in, together


def has_adapters(model: nn.Module) -> bool:
    """Whether ``model`` is one of PEFT's."""
    return isinstance(getattr(model, "peft_config", None), Mapping) and hasattr(model, "get_base_model")


def save_adapters(
    model: nn.Module,
    directory: str | Path,
    whole: Callable[[Collection[str]], Mapping[str, torch.Tensor]],
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write what ``PeftModel.from_pretrained`` reads; all ranks must call it, the first one writes.

    Args:
        model: a PEFT model without data.
        whole: names of tensors → the whole tensors, on every rank; it is asked for the adapters' alone.
        dtype: of floating-point tensors in the files; None to keep each one's own.

    Raises:
        ValueError: on all ranks, if the files cannot be written.
    """
    from peft import get_peft_model_state_dict

    content: dict[str, torch.Tensor] = model.state_dict()
    adapters: Any = model.peft_config
    selected = {
        id(tensor)
        for adapter in adapters
        for tensor in get_peft_model_state_dict(model, state_dict=content, adapter_name=adapter).values()
    }
    for name, tensor in whole([name for name, tensor in content.items() if id(tensor) in selected]).items():
        content[name] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    def write() -> None:
        if rank_in() == 0:
            writer: Any = model
            writer.save_pretrained(str(directory), state_dict=content)

    together(write)
