"""PEFT models in PEFT's own files: adapters beside ``adapter_config.json``, or the base model with them merged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.agreement.ranks_together import rank_in, together

#: Names of tensors → the whole tensors, on every rank; all ranks must call it.
Gather = Callable[[Collection[str]], Mapping[str, torch.Tensor]]

#: Where PEFT keeps what makes virtual tokens, which it runs for what it saves.
_PROMPTS = "prompt_encoder."


def has_adapters(model: nn.Module) -> bool:
    """Whether ``model`` is one of PEFT's."""
    return isinstance(getattr(model, "peft_config", None), Mapping) and hasattr(model, "get_base_model")


def save_adapters(model: nn.Module, directory: str | Path, whole: Gather, *, dtype: torch.dtype | None = None) -> None:
    """Write what ``PeftModel.from_pretrained`` reads; all ranks must call it, the first one writes.

    Args:
        model: a PEFT model without data.
        whole: it is asked for the adapters' tensors alone.
        dtype: of floating-point tensors in the files; None to keep each one's own.

    Raises:
        ValueError: on all ranks, if the files cannot be written.
    """
    from peft import get_peft_model_state_dict

    content: dict[str, torch.Tensor] = model.state_dict()
    prompts = _converted(whole([name for name in content if name.startswith(_PROMPTS)]), dtype)
    writer: Any = _with_values(model, prompts) if prompts else model
    selected = {
        id(tensor)
        for adapter in writer.peft_config
        for tensor in get_peft_model_state_dict(writer, state_dict=content, adapter_name=adapter).values()
    }
    content |= _converted(whole([name for name, tensor in content.items() if id(tensor) in selected]), dtype)

    def write() -> None:
        if rank_in() == 0:
            writer.save_pretrained(str(directory), state_dict=content)

    together(write)


def save_merged(model: nn.Module, directory: str | Path, whole: Gather, *, dtype: torch.dtype | None = None) -> None:
    """Write the base model with its adapters merged, for its own ``from_pretrained``; all ranks must call it.

    The first rank merges and writes: it alone has all weights in memory.

    Raises:
        ValueError: on all ranks, for adapters that cannot be merged (virtual tokens), and if the files cannot be
            written.
    """
    writer: Any = model
    if not hasattr(writer.base_model, "merge_and_unload"):
        raise ValueError(
            f"{writer.peft_type.value} has nothing to merge into weights: leave out merge_adapters, which saves the "
            "adapters for PeftModel.from_pretrained"
        )
    content: dict[str, torch.Tensor] = {}
    for name in model.state_dict():
        tensors = whole([name])
        if rank_in() == 0:
            content |= tensors

    def write() -> None:
        if rank_in() == 0:
            merged = _merged(_with_values(model, content))
            (merged if dtype is None else merged.to(dtype)).save_pretrained(str(directory))

    together(write)


def _merged(model: Any) -> Any:
    """The base model; weights that were tied and of which one has an adapter are two from now on."""
    merged = model.merge_and_unload()
    inputs, outputs = merged.get_input_embeddings(), merged.get_output_embeddings()
    if outputs is not None and torch.equal(inputs.weight, outputs.weight):
        merged.tie_weights()
    else:
        merged.config.tie_word_embeddings = False
    return merged


def _converted(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    return {
        name: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def _with_values(model: nn.Module, values: Mapping[str, torch.Tensor]) -> nn.Module:
    """A copy of a model without data that has ``values`` under their names."""
    copied = copy.deepcopy(model)
    copied.load_state_dict(values, strict=False, assign=True)
    return copied
