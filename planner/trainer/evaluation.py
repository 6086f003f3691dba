"""Evaluation and prediction: whole datasets, in whole batches, with nothing left out or counted twice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from planner.trainer import trainer_batches as batches
from planner.trainer.protocol import Training
from runtime.data.loader import DataLoader
from runtime.execution.outputs import loss_of


def evaluate(trainer: Training, dataset: Any) -> dict[str, float]:
    """The weighted mean loss of a dataset, and means of the trainer's metrics."""
    # Metrics compare outputs, which are whole, with batches.
    local = not trainer.metrics and _every_rank_reads_labels(trainer)
    losses, counts, sizes = [], [], []
    sums = dict.fromkeys(trainer.metrics, 0.0)
    for batch, num_samples in _full_batches(trainer, dataset, exact=True, local=local):
        outputs = batches.run(trainer.parallel, batch, local_inputs=local)
        losses.append(loss_of(outputs).detach().double())
        counts.append(trainer.count_fn(batch) * num_samples / trainer.global_batch)
        sizes.append(num_samples)
        for name, metric in trainer.metrics.items():
            sums[name] += float(torch.as_tensor(metric(outputs, batch)).double().mean()) * num_samples
    if not losses:
        raise ValueError("the dataset is empty")
    weights = torch.tensor(counts, dtype=torch.float64, device=trainer.parallel.layout.device)
    if local and dist.is_initialized():
        dist.all_reduce(weights)
        weights *= trainer.parallel.num_data_ranks / dist.get_world_size()
    counted = weights > 0  # the mean over no label at all is no number
    if not counted.any():
        raise ValueError("the dataset has no sample with a valid label to evaluate")
    loss = (torch.stack(losses)[counted] * weights[counted]).sum() / weights.sum()
    return {"loss": float(loss), **{name: total / sum(sizes) for name, total in sums.items()}}


def predict(trainer: Training, dataset: Any) -> list[Any]:
    """One output for each sample, in order."""
    predictions: list[Any] = []
    for batch, num_samples in _full_batches(trainer, dataset, exact=False):
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
        predictions.extend(itertools.islice(outputs, num_samples))
    return predictions


def _every_rank_reads_labels(trainer: Training) -> bool:
    """Whether every rank reads all fields; with a pipeline, stages read only the fields that they use."""
    return trainer.parallel.plan.step.axes.get("pp", 1) == 1


def _full_batches(trainer: Training, dataset: Any, *, exact: bool, local: bool = False) -> Iterator[tuple[Any, int]]:
    """Full global batches (or this data group's share of them), and how many different samples each holds."""
    size = trainer.global_batch
    for block in _blocks(dataset, size):
        parts = batches.chunks(len(block), size, exact=exact)
        loader = DataLoader(
            batches.SampleRows(block, parts, size),
            batches.DataGroup.of(trainer.parallel) if local else None,
            batch_size=size,
            shuffle=False,
            # Groups do not know how long the samples of the others are.
            collate_fn=trainer.collator(longest=local),
            num_workers=0 if block is not dataset else trainer.loader_options.get("num_workers", 0),
            last="drop",
        )
        for chunk, batch in zip(parts, loader, strict=True):
            yield batches.moved(batch, trainer.parallel.layout.device), chunk.num_samples


def _blocks(dataset: Any, size: int) -> Iterator[Any]:
    """The dataset, or the samples of a stream, in batches."""
    if not isinstance(dataset, IterableDataset):
        yield dataset
        return
    samples = iter(dataset)
    while block := list(itertools.islice(samples, size)):
        yield block


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
