"""Evaluation and prediction: whole datasets, in whole batches, with nothing left out or counted twice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from planner.trainer import batches
from runtime.data.loader import DataLoader
from runtime.outputs import loss_of

if TYPE_CHECKING:
    from planner.trainer.trainer import Trainer


def evaluate(trainer: Trainer, dataset: Any) -> dict[str, float]:
    """The weighted mean loss of a dataset, and means of the trainer's metrics."""
    sums = dict.fromkeys(("loss", *trainer.metrics), 0.0)
    weights = dict.fromkeys(sums, 0.0)
    for batch, num_samples in _whole_batches(trainer, dataset, exact=True):
        outputs = batches.run(trainer.parallel, batch)
        share = num_samples / trainer.global_batch
        count = trainer.count_fn(batch) * share
        if count:
            sums["loss"] += float(loss_of(outputs)) * count
            weights["loss"] += count
        for name, metric in trainer.metrics.items():
            value = torch.as_tensor(metric(outputs, batch)).double().mean()
            sums[name] += float(value) * num_samples
            weights[name] += num_samples
    if not weights["loss"]:
        raise ValueError("the dataset has no sample with a valid label to evaluate")
    return {name: total / weights[name] for name, total in sums.items()}


def predict(trainer: Trainer, dataset: Any) -> list[Any]:
    """One output for each sample, in order."""
    found: list[Any] = []
    for batch, num_samples in _whole_batches(trainer, dataset, exact=False):
        if trainer.predict_fn is not None:
            outputs = trainer.predict_fn(trainer.parallel, batch)
        else:
            outputs = _main_output(batches.run(trainer.parallel, batch))
        if isinstance(outputs, torch.Tensor):
            outputs = outputs.detach().cpu()
        if len(outputs) < num_samples:
            raise ValueError(
                f"predict_fn gave {len(outputs)} outputs for a batch of {trainer.global_batch} samples: return one for "
                "each sample"
            )
        found.extend(itertools.islice(outputs, num_samples))
    return found


def _whole_batches(trainer: Trainer, dataset: Any, *, exact: bool) -> Iterator[tuple[Any, int]]:
    """Full global batches on every rank, and how many different samples, the first ones, each holds."""
    size = trainer.global_batch
    if isinstance(dataset, IterableDataset):
        dataset = list(dataset)
    parts = batches.chunks(len(dataset), size, exact=exact)
    options: dict[str, Any] = {"num_workers": trainer.loader_options.get("num_workers", 0)}
    rows: Sequence[Any] = batches.Rows(dataset, parts, size)
    loader = DataLoader(rows, batch_size=size, shuffle=False, collate_fn=trainer.collate_fn, last="drop", **options)
    for chunk, batch in zip(parts, loader, strict=True):
        yield batches.moved(batch, trainer.parallel.layout.device), chunk.num_samples


def _main_output(outputs: Any) -> Any:
    """Logits, or the first output that is not the loss."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    if hasattr(outputs, "outputs"):
        return _main_output(outputs.outputs)
    if not isinstance(outputs, Mapping):
        return next((value for value in outputs if isinstance(value, torch.Tensor) and value.dim()), None)
    name = "logits" if "logits" in outputs else next(name for name in outputs if name != "loss")
    return outputs[name]
