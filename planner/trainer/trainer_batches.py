"""Batches of the trainer: calling a model on a batch, and a batch's weight in a mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from cost_models import Cluster
from passes.plan import Plan
from planner.targets import Target, axis_sizes, plans_step, read_target
from runtime.mesh.layout import DATA


def run(function: Callable[..., Any], batch: Any, **options: Any) -> Any:
    """``function`` called on a batch: a mapping by name, a tuple or list by position, anything else as one argument."""
    if isinstance(batch, Mapping):
        return function(**batch, **options)
    return function(*batch, **options) if isinstance(batch, (tuple, list)) else function(batch, **options)


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(moved(value, device) for value in batch)
    return batch


def tensors_of(batch: Any) -> dict[str, torch.Tensor]:
    """The tensors at the top of a batch, by name or position."""
    items = (
        batch.items()
        if isinstance(batch, Mapping)
        else enumerate(batch if isinstance(batch, (tuple, list)) else (batch,))
    )
    return {str(name): value for name, value in items if isinstance(value, torch.Tensor)}


def example_batch(dataset: Any, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None) -> Any:
    """A batch of the first samples (repeated if there are fewer), for its shapes."""
    collate = collate_fn or default_collate
    if isinstance(dataset, IterableDataset):
        samples = [sample for _, sample in zip(range(batch_size), dataset)]
    else:
        samples = [dataset[index] for index in range(min(batch_size, len(dataset)))]
    if not samples:
        raise ValueError("the dataset is empty")
    return collate([samples[index % len(samples)] for index in range(batch_size)])


def data_pins(example: Any, batch_size: int, mesh: Target, options: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Constraints that give every data-parallel group its own samples, as a planned step does by itself."""
    target = read_target(mesh)
    if isinstance(target, (Plan, Cluster)) or plans_step(target, options) or DATA not in axis_sizes(target):
        return {}
    tensors = tensors_of(example)
    cut = [name for name, value in tensors.items() if value.dim() and len(value) == batch_size]
    # One pattern where it will do: predictions may be made from other inputs.
    patterns = ["*"] if len(cut) == len(tensors) else cut
    return {f"input:{pattern}": {DATA: "S(0)"} for pattern in patterns}


@dataclass(frozen=True)
class DataGroup:
    """The samples that a rank reads, with all their fields, since a call of the model names all its inputs."""

    data_rank: int
    num_data_ranks: int

    @classmethod
    def of(cls, parallel: Any) -> DataGroup:
        return cls(parallel.data_rank, parallel.num_data_ranks)


def count_valid(batch: Any, fields: Sequence[str], *, shifted: bool, ignore_index: int = -100) -> float:
    """How many labels a mean loss is over: those that are not ``ignore_index``; without labels, how many samples.

    With ``shifted`` each label of a sequence but the first counts (a causal model predicts the next token).
    """
    tensors = tensors_of(batch)
    for name in fields:
        labels = tensors.get(name)
        if labels is not None and _is_label(labels):
            counted = labels[..., 1:] if shifted and labels.dim() > 1 else labels
            return float((counted != ignore_index).sum())
    return float(next((len(value) for value in tensors.values() if value.dim()), 0))


def shifts_labels(model: Any) -> bool:
    """Whether a Hugging Face model predicts the next token of its labels."""
    config = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return False
    return getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"


def _is_label(value: torch.Tensor) -> bool:
    return value.dim() > 0 and not value.is_floating_point() and value.dtype != torch.bool
