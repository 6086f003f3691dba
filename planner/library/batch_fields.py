"""The tensors of a training batch, by task: shapes, and what their values may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.library import tasks
from planner.library.batch_sizes import NO_LENGTH
from planner.library.image_tokens import TYPED, image_fields

#: Pixels along each side of an image where the config does not say (``resnet`` takes any).
IMAGE_SIZE = 224

#: Frames of speech for each label, so that an alignment exists.
FRAMES_PER_LABEL = 4

#: Model types whose positions are counted from after the padding token's index, so that they have fewer.
POSITIONS_AFTER_PADDING = frozenset({
    "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "data2vec-text", "esm",
    "longformer", "mpnet", "ibert", "luke", "mluke",
})  # fmt: skip


@dataclass(frozen=True)
class Field:
    """One tensor of a batch: integers from ``low`` below ``high``, or floats if ``high`` is None.

    ``placeholders``: how many of a row's tokens, from the second on, stand for an image, and the token that says so.
    """

    shape: tuple[int, ...]
    high: int | None = None
    ignored: bool = False
    low: int = 0
    placeholders: tuple[int, int] | None = None


@dataclass(frozen=True)
class ConstantField:
    """An argument with the same value in every batch: a flag, or nested lists of integers for a tensor."""

    value: Any


Fields = dict[str, Field | ConstantField]


def batch_fields(model_or_config: Any, *, batch_size: int, seq_len: int | None) -> Fields:
    """The arguments of a training step of the model.

    Raises:
        ValueError: if the model's task is unknown, or the sizes do not fit the model.
    """
    config = getattr(model_or_config, "config", model_or_config)
    name = type(model_or_config).__name__
    if hasattr(config, "model_type") and config is model_or_config:
        name = tasks.training_class(config.model_type, config.architectures).__name__
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    return _FIELDS[tasks.task_of(name)](config, batch_size, seq_len)


def check_positions(config: Any, length: int, what: str) -> None:
    """Raise ValueError for more tokens than a model with learned positions has; ``what`` they are, in words."""
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "max_target_positions", None)
    if longest is not None and config.model_type in POSITIONS_AFTER_PADDING:
        longest -= (config.pad_token_id or 0) + 1
    if longest is not None and length > longest and not getattr(text, "rope_parameters", None):
        raise ValueError(f"{what} {length} is more than the {longest} positions that the model has")


def _tokens(config: Any, batch_size: int, seq_len: int | None) -> Field:
    if seq_len is None:
        raise ValueError(NO_LENGTH)
    if seq_len < 2:
        raise ValueError(f"seq_len must be at least 2, got {seq_len}")
    check_positions(config, seq_len, "seq_len")
    return Field((batch_size, seq_len), config.get_text_config().vocab_size)


def _language(config: Any, batch_size: int, seq_len: int | None) -> Fields:
    tokens = _tokens(config, batch_size, seq_len)
    return {"input_ids": tokens, "labels": Field(tokens.shape, tokens.high, ignored=True)}


def _pixels(config: Any, batch_size: int) -> Field:
    size = getattr(config, "image_size", IMAGE_SIZE)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return Field((batch_size, config.num_channels, height, width))


def _images(config: Any, batch_size: int, seq_len: int | None) -> Fields:
    return {"pixel_values": _pixels(config, batch_size), "labels": Field((batch_size,), config.num_labels)}


def _sequences(config: Any, batch_size: int, seq_len: int | None) -> Fields:
    return {"input_ids": _tokens(config, batch_size, seq_len), "labels": Field((batch_size,), config.num_labels)}


def _labelled_tokens(config: Any, batch_size: int, seq_len: int | None) -> Fields:
    tokens = _tokens(config, batch_size, seq_len)
    return {"input_ids": tokens, "labels": Field(tokens.shape, config.num_labels, ignored=True)}


def _spectrograms(config: Any, batch_size: int, seq_len: int | None) -> Fields:
    """Log-mel spectrograms of the length that the encoder has positions for (its second convolution halves them)."""
    if not hasattr(config, "max_source_positions") or not hasattr(config, "num_mel_bins"):
        raise ValueError(f"cannot make up a batch for model type {config.model_type!r}: pass example_inputs=")
    tokens = _tokens(config, batch_size, seq_len)
    frames = 2 * config.max_source_positions
    return {
        "input_features": Field((batch_size, config.num_mel_bins, frames)),
        "labels": Field(tokens.shape, tokens.high, ignored=True),
    }


def _waves(config: Any, batch_size: int, seq_len: int | None) -> Fields:
    """Sound waves, for ``seq_len`` labels each."""
    if not hasattr(config, "inputs_to_logits_ratio") or not hasattr(config, "conv_kernel"):
        raise ValueError(f"cannot make up a batch for model type {config.model_type!r}: pass example_inputs=")
    labels = _tokens(config, batch_size, seq_len)
    length = config.inputs_to_logits_ratio * labels.shape[1] * FRAMES_PER_LABEL + sum(config.conv_kernel)
    blank = config.pad_token_id or 0
    return {
        "input_values": Field((batch_size, length)),
        "labels": Field(labels.shape, labels.high, ignored=True, low=blank + 1),
    }


def _pairs(config: Any, batch_size: int, seq_len: int | None) -> Fields:
    """Images with their texts."""
    tokens = _tokens(config, batch_size, seq_len)
    return {
        "input_ids": tokens,
        "pixel_values": _pixels(config.vision_config, batch_size),
        "return_loss": ConstantField(True),
    }


def _illustrated(config: Any, batch_size: int, seq_len: int | None) -> Fields:
    """Texts of one image each: the tokens that stand for it first, then words."""
    images, placeholders, first_special = image_fields(config, batch_size)
    tokens = _tokens(config, batch_size, seq_len)
    if placeholders is not None and tokens.shape[1] < placeholders[0] + 2:
        raise ValueError(
            f"seq_len {tokens.shape[1]} is too short: an image takes {placeholders[0]} tokens, expected "
            f"{placeholders[0] + 2} or more"
        )
    high = min(tokens.high or 0, first_special)
    return {
        "input_ids": Field(tokens.shape, high, placeholders=placeholders),
        **{name: Field(value) if isinstance(value, tuple) else ConstantField(value) for name, value in images.items()},
        **({"mm_token_type_ids": _image_types(tokens, placeholders)} if config.model_type in TYPED else {}),
        "labels": Field(tokens.shape, high, ignored=True),
    }


def _image_types(tokens: Field, placeholders: tuple[int, int] | None) -> Field:
    return Field(tokens.shape, 1, placeholders=placeholders and (placeholders[0], 1))


_FIELDS: dict[str, Callable[[Any, int, int | None], Fields]] = {
    tasks.CAUSAL_LM: _language,
    tasks.MASKED_LM: _language,
    tasks.SEQ_TO_SEQ_LM: _language,
    tasks.IMAGE_CLASSIFICATION: _images,
    tasks.SEQUENCE_CLASSIFICATION: _sequences,
    tasks.TOKEN_CLASSIFICATION: _labelled_tokens,
    tasks.SPEECH_TO_TEXT: _spectrograms,
    tasks.SPEECH_FRAMES: _waves,
    tasks.IMAGE_TEXT_PAIRS: _pairs,
    tasks.IMAGE_TEXT_TO_TEXT: _illustrated,
}
