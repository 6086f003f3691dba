"""Training batches of Hugging Face models, made from the config alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.library.batch_fields import ConstantField, Field, batch_fields

if TYPE_CHECKING:
    import torch

#: Label that the loss ignores.
IGNORED = -100


def example_batch(model_or_config: Any, *, batch_size: int, seq_len: int | None = None) -> dict[str, Any]:
    """The keyword arguments of a training step as meta tensors (shapes and dtypes only).

    Tensors whose values say how a batch is laid out (grids of patches) have values; flags are flags.

    Args:
        model_or_config: a Hugging Face model, or its config.
        seq_len: tokens per sample; not used for images.

    Raises:
        ValueError: if the model's task is unknown, or the sizes do not fit the model.
    """
    import torch

    dtype = _float_dtype(model_or_config)

    def example(field: Field | ConstantField) -> Any:
        if isinstance(field, ConstantField):
            return _constant(field)
        return torch.empty(field.shape, dtype=dtype if field.high is None else torch.int64, device="meta")

    fields = batch_fields(model_or_config, batch_size=batch_size, seq_len=seq_len)
    return {name: example(field) for name, field in fields.items()}


def random_batch(
    model_or_config: Any, *, batch_size: int, seq_len: int | None = None, seed: int = 0, device: str = "cpu"
) -> dict[str, Any]:
    """A random batch. In token labels each row ignores a different number of tokens and keeps at least one.

    The same seed gives the same batch on every device.

    Raises:
        ValueError: as ``example_batch``.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    dtype = _float_dtype(model_or_config)
    batch: dict[str, Any] = {}
    for name, field in batch_fields(model_or_config, batch_size=batch_size, seq_len=seq_len).items():
        value = _constant(field) if isinstance(field, ConstantField) else _random(field, dtype, generator)
        batch[name] = value.to(device) if isinstance(value, torch.Tensor) else value
    return batch


def example_ids(model_or_config: Any, *, batch_size: int, seq_len: int | None = None) -> dict[str, Any]:
    """The integers of a random batch (tokens, labels, constants), for models whose Python code reads them.

    Raises:
        ValueError: as ``example_batch``.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    fields = batch_fields(model_or_config, batch_size=batch_size, seq_len=seq_len)
    return {
        name: _constant(field) if isinstance(field, ConstantField) else _random(field, torch.int64, generator)
        for name, field in fields.items()
        if isinstance(field, ConstantField) or field.high is not None
    }


def _random(field: Field, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    import torch

    if field.high is None:
        return torch.randn(field.shape, generator=generator, dtype=torch.float64).to(dtype)
    tensor = torch.randint(field.low, field.high, field.shape, generator=generator)
    if field.placeholders is not None:
        count, token = field.placeholders
        tensor[:, 1 : 1 + count] = token
    if field.ignored:
        num_valid = torch.randint(2, field.shape[1] + 1, (field.shape[0], 1), generator=generator)
        tensor = torch.where(torch.arange(field.shape[1]) < num_valid, tensor, IGNORED)
    return tensor


def _constant(field: ConstantField) -> Any:
    import torch

    return torch.tensor(field.value) if isinstance(field.value, list) else field.value


def _float_dtype(model_or_config: Any) -> torch.dtype:
    """Dtype of floating-point inputs: that of the model's parameters."""
    import torch

    parameters = getattr(model_or_config, "parameters", None)
    first = next(iter(parameters()), None) if callable(parameters) else None
    return torch.float32 if first is None else first.dtype
