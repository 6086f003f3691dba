"""Training batches of Hugging Face models, made from the config alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planner.library import tasks

if TYPE_CHECKING:
    import torch

#: Pixels along each side of an image where the config does not say (``resnet`` takes any).
IMAGE_SIZE = 224

#: Model types whose positions are counted from after the padding token's index, so that they have fewer.
POSITIONS_AFTER_PADDING = frozenset({
    "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "data2vec-text", "esm",
    "longformer", "mpnet", "ibert", "luke", "mluke",
})  # fmt: skip

#: Label that the loss ignores.
IGNORED = -100


@dataclass(frozen=True)
class Field:
    """One tensor of a batch: integers below ``high``, or floats if ``high`` is None."""

    shape: tuple[int, ...]
    high: int | None = None
    ignored: bool = False


def example_batch(model_or_config: Any, *, batch_size: int, seq_len: int | None = None) -> dict[str, torch.Tensor]:
    """The keyword arguments of a training step as meta tensors (shapes and dtypes only).

    Args:
        model_or_config: a Hugging Face model, or its config.
        seq_len: tokens per sample; not used for images.

    Raises:
        ValueError: if the model's task is unknown, or the sizes do not fit the model.
    """
    import torch

    dtype = _float_dtype(model_or_config)
    fields = batch_fields(model_or_config, batch_size=batch_size, seq_len=seq_len)
    return {
        name: torch.empty(field.shape, dtype=dtype if field.high is None else torch.int64, device="meta")
        for name, field in fields.items()
    }


def random_batch(
    model_or_config: Any, *, batch_size: int, seq_len: int | None = None, seed: int = 0, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """A random batch. In token labels each row ignores a different number of tokens and keeps at least one.

    The same seed gives the same batch on every device.

    Raises:
        ValueError: as ``example_batch``.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    dtype = _float_dtype(model_or_config)
    batch = {}
    for name, field in batch_fields(model_or_config, batch_size=batch_size, seq_len=seq_len).items():
        if field.high is None:
            tensor = torch.randn(field.shape, generator=generator, dtype=torch.float64).to(dtype)
        else:
            tensor = torch.randint(0, field.high, field.shape, generator=generator)
        if field.ignored:
            num_kept = torch.randint(2, field.shape[1] + 1, (field.shape[0], 1), generator=generator)
            tensor = torch.where(torch.arange(field.shape[1]) < num_kept, tensor, IGNORED)
        batch[name] = tensor.to(device)
    return batch


def batch_fields(model_or_config: Any, *, batch_size: int, seq_len: int | None) -> dict[str, Field]:
    """The tensors of a training batch of the model."""
    config = getattr(model_or_config, "config", model_or_config)
    name = type(model_or_config).__name__
    if hasattr(config, "model_type") and config is model_or_config:
        name = tasks.training_class(config.model_type, config.architectures).__name__
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    return _FIELDS[tasks.task_of(name)](config, batch_size, seq_len)


def _tokens(config: Any, batch_size: int, seq_len: int | None) -> Field:
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and config.model_type in POSITIONS_AFTER_PADDING:
        longest -= (config.pad_token_id or 0) + 1
    if seq_len is None:
        raise ValueError("seq_len is missing: give the number of tokens of each sample")
    if seq_len < 2:
        raise ValueError(f"seq_len must be at least 2, got {seq_len}")
    if longest is not None and seq_len > longest and not getattr(config, "rope_parameters", None):
        raise ValueError(f"seq_len {seq_len} is more than the {longest} positions that the model has")
    return Field((batch_size, seq_len), config.get_text_config().vocab_size)


def _language(config: Any, batch_size: int, seq_len: int | None) -> dict[str, Field]:
    tokens = _tokens(config, batch_size, seq_len)
    return {"input_ids": tokens, "labels": Field(tokens.shape, tokens.high, ignored=True)}


def _images(config: Any, batch_size: int, seq_len: int | None) -> dict[str, Field]:
    size = getattr(config, "image_size", IMAGE_SIZE)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return {
        "pixel_values": Field((batch_size, config.num_channels, height, width)),
        "labels": Field((batch_size,), config.num_labels),
    }


def _sequences(config: Any, batch_size: int, seq_len: int | None) -> dict[str, Field]:
    return {"input_ids": _tokens(config, batch_size, seq_len), "labels": Field((batch_size,), config.num_labels)}


def _labelled_tokens(config: Any, batch_size: int, seq_len: int | None) -> dict[str, Field]:
    tokens = _tokens(config, batch_size, seq_len)
    return {"input_ids": tokens, "labels": Field(tokens.shape, config.num_labels, ignored=True)}


_FIELDS: dict[str, Callable[[Any, int, int | None], dict[str, Field]]] = {
    tasks.CAUSAL_LM: _language,
    tasks.MASKED_LM: _language,
    tasks.SEQ_TO_SEQ_LM: _language,
    tasks.IMAGE_CLASSIFICATION: _images,
    tasks.SEQUENCE_CLASSIFICATION: _sequences,
    tasks.TOKEN_CLASSIFICATION: _labelled_tokens,
}


def _float_dtype(model_or_config: Any) -> torch.dtype:
    """Dtype of floating-point inputs: that of the model's parameters."""
    import torch

    parameters = getattr(model_or_config, "parameters", None)
    first = next(iter(parameters()), None) if callable(parameters) else None
    return torch.float32 if first is None else first.dtype
