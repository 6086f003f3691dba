"""Images of prompts that get several rows, as beams and ``num_return_sequences`` ask for.

transformers encodes images before it repeats rows, and repeats what the encoder gave, by sample. Here the program of
the prompt encodes them: the images themselves are repeated, where it is known which of them are a sample's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from runtime.generation.generating_part import OTHERWISE

_MODALITIES = ("image", "video")
#: The inputs that have what is encoded; others say how large it is.
_ENCODED = ("pixel_values", "pixel_values_images", "pixel_values_videos", "image_patches")


def with_images_expanded(model: Any, expand: Callable[..., Any]) -> Callable[..., Any]:
    """``expand(expand_size, …)`` of a model, which repeats the rows of all inputs, with images repeated by sample."""

    def expanded(
        expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **inputs: Any
    ) -> tuple[Any, dict[str, Any]]:
        images = {} if expand_size == 1 else images_of(model, input_ids, inputs)
        others = {name: value for name, value in inputs.items() if name not in images}
        input_ids, others = expand(
            expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **others
        )
        count = 0 if input_ids is None else len(input_ids) // expand_size
        repeated = {
            name: value.unflatten(0, (count, -1)).repeat_interleave(expand_size, 0).flatten(0, 1)
            for name, value in images.items()
        }
        return input_ids, {**others, **repeated}

    return expanded


def images_of(model: Any, input_ids: torch.Tensor | None, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The inputs that are encoded, of as many entries for each row of ``input_ids``.

    Raises:
        ValueError: if they may be of another number or size in one sample than in the next.
    """
    by_name: dict[str, torch.Tensor] = {}
    for modality in _MODALITIES:
        encode = getattr(model.base_model, f"get_{modality}_features", None)
        names = [] if encode is None else [name for name in inspect.signature(encode).parameters if name in inputs]
        tensors = {name: inputs[name] for name in names if isinstance(inputs[name], torch.Tensor)}
        if any(name in tensors for name in _ENCODED):
            _check_alike(model, modality, input_ids, tensors)
            by_name |= tensors
    return by_name


def _check_alike(model: Any, modality: str, input_ids: torch.Tensor | None, tensors: dict[str, torch.Tensor]) -> None:
    token = getattr(model.config, f"{modality}_token_id", None)
    if input_ids is not None and token is not None:
        counts = (input_ids == token).sum(-1)
        sizes = [tensor for name, tensor in tensors.items() if name not in _ENCODED]
        if (
            bool((counts == counts[0]).all() & (counts[0] > 0))
            and all(len(tensor) % len(input_ids) == 0 for tensor in tensors.values())
            and all(bool((tensor == tensor[:1]).all()) for tensor in sizes)
        ):
            return
    raise ValueError(
        f"rows are repeated (for num_beams, num_return_sequences, or to divide them over ranks) whose {modality}s are "
        f"not as many and as large in each: generate from prompts alike, or {OTHERWISE}"
    )
