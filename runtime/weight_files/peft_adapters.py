"""PEFT models in PEFT's own files: adapters beside ``adapter_config.json``, or the base model with them merged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from passes.torch_compat.operators import tree_leaves
from runtime.agreement.ranks_together import rank_in, together

#: Names of tensors → the whole tensors, on every rank; all ranks must call it.
Gather = Callable[[Collection[str]], Mapping[str, torch.Tensor]]

#: Where PEFT keeps what makes virtual tokens, which it runs for what it saves.
_PROMPTS = "prompt_encoder."
#: The virtual tokens themselves in its files.
_SAVED_PROMPTS = "prompt_embeddings"


@dataclass(frozen=True)
class SavedAdapters:
    """Whole tensors of adapters by the names of a model's state dict, and what their files have and have not.

    Attributes:
        num_bytes: of the files.
        missing: names of the model's adapters that the files have not.
        unexpected: names in the files that the model has not.
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    num_bytes: int = 0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


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
    content: dict[str, torch.Tensor] = model.state_dict()
    prompts = _converted(whole([name for name in content if name.startswith(_PROMPTS)]), dtype)
    writer: Any = _with_values(model, prompts) if prompts else model
    content |= _converted(whole(_adapter_names(writer, content)), dtype)

    def write() -> None:
        if rank_in() == 0:
            writer.save_pretrained(str(directory), state_dict=content)

    together(write)


def _adapter_names(model: Any, content: Mapping[str, torch.Tensor]) -> list[str]:
    """Names, of ``content``, of what PEFT makes its files of, and those of what makes virtual tokens."""
    from peft import get_peft_model_state_dict

    marked = {name: _Marked.of(tensor, name) for name, tensor in content.items()}
    selected: set[str] = set()
    for adapter in model.peft_config:
        saved = get_peft_model_state_dict(model, state_dict=dict(marked), adapter_name=adapter)
        selected = selected.union(*(tensor.origins for tensor in saved.values() if isinstance(tensor, _Marked)))
    return [name for name in content if name in selected or name.startswith(_PROMPTS)]


class _Marked(torch.Tensor):
    """Zeros in the place of a tensor, all in one number's memory, that say of which tensors what is made of them is.

    On the meta device PEFT could not choose rows (AdaLoRA saves those that its budget left).
    """

    origins: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str) -> _Marked:
        """As large as ``tensor``."""
        marked = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape).as_subclass(cls)
        marked.origins = frozenset({name})
        return marked

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        sources = [each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)]
        for each in tree_leaves(result):
            if isinstance(each, cls):
                each.origins = each.origins.union(*(source.origins for source in sources))
        return result


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


def has_saved_adapters(directory: str | Path) -> bool:
    """Whether PEFT has saved adapters in a directory."""
    return (Path(directory) / "adapter_config.json").exists() or any(Path(directory).glob("*/adapter_config.json"))


def read_adapters(model: nn.Module, directory: str | Path, *, strict: bool) -> SavedAdapters:
    """The adapters that ``save_adapters``, or PEFT's own ``save_pretrained``, wrote; all ranks must call it.

    The first rank reads them: adapters are small.

    Args:
        model: a PEFT model without data, with the same adapters.
        strict: refuse missing and unexpected names, else take what fits.

    Raises:
        ValueError: on all ranks, for files that are absent or damaged, and for those of other adapters.
    """
    return together(lambda: _read(model, Path(directory), strict=strict) if rank_in() == 0 else SavedAdapters())


def _read(model: nn.Module, directory: Path, *, strict: bool) -> SavedAdapters:
    from peft import set_peft_model_state_dict

    content: dict[str, torch.Tensor] = model.state_dict()
    prompts = _unset({name: tensor for name, tensor in content.items() if name.startswith(_PROMPTS)})
    names = _adapter_names(_with_values(model, prompts), content)
    unset = _unset({name: content[name] for name in names})
    reader: Any = _with_values(model, unset)
    num_bytes, unexpected = 0, []
    for adapter in reader.peft_config:
        folder = directory if adapter == "default" else directory / adapter
        file = folder / "adapter_model.safetensors"
        if not file.exists():
            raise ValueError(f"{folder} has no adapter_model.safetensors of the adapter {adapter!r}: save it there")
        num_bytes += file.stat().st_size
        try:
            stored = load_file(file)
            result: Any = set_peft_model_state_dict(reader, stored, adapter_name=adapter)
        except (SafetensorError, RuntimeError, KeyError) as error:
            raise ValueError(f"{file} does not fit the model's adapter {adapter!r}: {error}") from error
        unexpected += [name for name in result.unexpected_keys if name != _SAVED_PROMPTS]
    read = {name: tensor for name, tensor in reader.state_dict().items() if name in unset}
    missing = [name for name, tensor in read.items() if tensor.isnan().all()]
    if strict and (missing or unexpected):
        raise ValueError(
            f"{directory} does not fit the model's adapters: missing {missing[:3]}, unexpected {unexpected[:3]}; "
            "strict=False takes what fits"
        )
    tensors = {name: tensor for name, tensor in read.items() if name not in missing}
    return SavedAdapters(tensors, num_bytes, tuple(missing), tuple(unexpected))


def _unset(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors in memory of which no value is one that was read."""
    return {name: torch.full_like(tensor, torch.nan, device="cpu") for name, tensor in tensors.items()}
