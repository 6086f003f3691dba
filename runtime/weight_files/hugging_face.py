"""What a Hugging Face model says about its own files: names to expect, and the config that belongs beside weights."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.agreement.ranks_together import rank_in, together
from runtime.torch_compat.model_internals import tensors_to_ignore


def hugging_face_names(model: nn.Module) -> dict[str, Any]:
    """Arguments ``prefix``, ``ignore`` and ``rename`` of ``load_weights``, as far as ``model`` tells them."""
    patterns = tensors_to_ignore(model)
    saved_names = model.state_dict().keys()
    # Files of older versions hold buffers that are computed today.
    patterns.extend(f"^{re.escape(name)}$" for name, _ in model.named_buffers() if name not in saved_names)
    prefix = getattr(model, "base_model_prefix", None)
    return {"prefix": prefix, "ignore": patterns, "rename": _renaming(model)}


def _renaming(model: nn.Module) -> Callable[[str], str] | None:
    """How transformers renames tensors of files that are older than the model's code; None for other models.

    Conversions that compute (experts stacked into one tensor) are not among them.
    """
    if "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return None
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [step for step in get_model_conversion_mapping(model) if isinstance(step, WeightRenaming)]
    return lambda name: rename_source_key(name, renamings, [])[0]


def save_config(model: nn.Module, directory: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write the model's config (and that of its generation) where ``from_pretrained`` looks for them; on one rank."""
    together(lambda: _save_config(model, Path(directory), dtype) if rank_in() == 0 else None)


def _save_config(model: nn.Module, directory: Path, dtype: torch.dtype | None) -> None:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    written = copy.deepcopy(config)
    written.architectures = [type(model).__name__]
    written.dtype = dtype or next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    written.save_pretrained(directory)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(directory)
