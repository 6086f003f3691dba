"""Build a model from its config, on any device, without weights from anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.library.tasks import training_class

if TYPE_CHECKING:
    from torch import nn

DTYPES = ("float64", "float32", "bfloat16", "float16")


def build_model(config: Any, *, dtype: str = "float32", device: str = "meta") -> nn.Module:
    """The model of a config with its training head, in training mode, freshly initialised (or without data on meta).

    Args:
        config: a transformers config, or anything ``load_config`` takes.
        dtype: of the parameters, one of ``DTYPES``.
        device: ``"meta"`` for planning, else where to put it.

    Raises:
        ValueError: for an unknown dtype, or a model type without a training head.
    """
    import torch

    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    if isinstance(config, str):
        from planner.library.configs import load_config

        config = load_config(config)
    cls = training_class(config.model_type, config.architectures)
    with torch.device(device):
        model = cls._from_config(config, dtype=getattr(torch, dtype)).train()
    if config.is_encoder_decoder and not config.tie_word_embeddings:
        model.set_input_embeddings(model.get_input_embeddings())  # the head is apart; encoder and decoder still share
    return model
