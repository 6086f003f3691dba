"""Build a model from its config, on any device, without downloading weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.library.tasks import training_class

if TYPE_CHECKING:
    from torch import nn

#: Sizes of a config, by their standard names, that must be positive if present.
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
          "patch_size", "image_size", "num_channels")  # fmt: skip
_COUNTS = ("num_hidden_layers", "num_decoder_layers")
DTYPES = ("float64", "float32", "bfloat16", "float16")


def build_model(config: Any, *, dtype: str = "float32", device: str = "meta") -> nn.Module:
    """The model of a config with its training head, in training mode, freshly initialised (or without data on meta).

    Args:
        config: a transformers config, or anything ``load_config`` takes.
        dtype: of the parameters, one of ``DTYPES``.
        device: ``"meta"`` for planning, else where to put it.

    Raises:
        ValueError: for an unknown dtype, a model type without a training head, or sizes that no model can have.
    """
    import torch

    from runtime.torch_compat.model_internals import build_from_config

    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    if isinstance(config, str):
        from planner.library.configs import load_config

        config = load_config(config)
    _check_sizes(config)
    cls = training_class(config.model_type, config.architectures)
    try:
        with torch.device(device):
            model = build_from_config(cls, config, dtype=getattr(torch, dtype)).train()
        model = model.to(
            device
        )  # ``torch.Tensor(size)``, as wav2vec 2.0 writes, is on the CPU whatever the context says
    except Exception as error:  # models and their checks raise what they like
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"transformers cannot build a {config.model_type} from this config: {reason}") from error
    if config.is_encoder_decoder and not config.tie_word_embeddings:
        model.set_input_embeddings(model.get_input_embeddings())  # the head is apart; encoder and decoder still share
    return model


def _check_sizes(config: Any) -> None:
    """Raise ValueError for a size below one, or a number of layers below zero."""
    for name in (*_SIZES, *_COUNTS):
        size = getattr(config, name, None)
        smallest = 0 if name in _COUNTS else 1
        if isinstance(size, int) and size < smallest:
            raise ValueError(f"the {config.model_type} config says {name}={size}: expected {smallest} or more")
