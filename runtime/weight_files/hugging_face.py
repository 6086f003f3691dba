"""What a Hugging Face model says about its own files: names to expect, and the config that belongs beside weights."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.agreement import rank_in, together


def hugging_face_names(model: nn.Module) -> dict[str, Any]:
    """Arguments ``prefix`` and ``ignore`` of ``load_weights``, as far as ``model`` tells them."""
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    kept = model.state_dict().keys()
    # Files of older versions hold buffers that are computed today.
    patterns.extend(f"^{re.escape(name)}$" for name, _ in model.named_buffers() if name not in kept)
    return {"prefix": getattr(model, "base_model_prefix", None), "ignore": patterns}


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
