"""Evaluation and prediction: whole datasets, with nothing left out or counted twice."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist

from cost_models.text import counted
from planner.trainer import trainer_batches as batches
from planner.trainer.protocol import Training
from runtime.data.loader import DataLoader
from runtime.execution.outputs import loss_of


def evaluate(trainer: Training, dataset: Any) -> dict[str, float]:
    """The weighted mean loss of a dataset, and means of the trainer's metrics."""
    # Metrics compare outputs, which are whole, with batches.
    local = not trainer.metrics and _every_rank_reads_labels(trainer)
    losses: list[torch.Tensor] = []
    counts: list[float] = []
    sizes: list[int] = []
    sums = dict.fromkeys(trainer.metrics, 0.0)
    loader = _loader(trainer, dataset, local=local)
    for batch in loader:
        batch = batches.moved(batch, trainer.parallel.layout.device)
        is_part = local and loader.local_inputs
        outputs = batches.run(trainer.parallel, batch, local_inputs=is_part)
        losses.append(loss_of(outputs).detach().double())
        # What every group counts whole is counted as often as there are groups.
        counts.append(trainer.count_fn(batch) / (trainer.parallel.num_data_ranks if local and not is_part else 1))
        num_samples = loader.position - sum(sizes)
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
    loader = _loader(trainer, dataset)
    for batch in loader:
        batch = batches.moved(batch, trainer.parallel.layout.device)
        num_samples = loader.position - len(predictions)
        if trainer.predict_fn is not None:
            outputs = trainer.predict_fn(trainer.parallel, batch)
        elif trainer.predict_with_generate is not None:
            outputs = _generated(trainer, batch, trainer.predict_with_generate)
        else:
            outputs = _main_output(batches.run(trainer.parallel, batch))
        if isinstance(outputs, torch.Tensor):
            outputs = outputs.detach().cpu()
        check_number(outputs, num_samples, "predict_fn gave" if trainer.predict_fn else "the model gives")
        predictions.extend(itertools.islice(outputs, num_samples))
    return predictions


def check_number(outputs: Any, num_samples: int, who: str) -> None:
    """Raise ValueError unless there is an output for each sample."""
    if isinstance(outputs, torch.Tensor) and not outputs.ndim:
        words = "a single number"
    elif not isinstance(outputs, Sized):
        words = f"a {type(outputs).__name__}"
    elif len(outputs) < num_samples:
        words = counted(len(outputs), "output")
    else:
        return
    raise ValueError(
        f"{who} {words} for a batch of {counted(num_samples, 'sample')}: give the trainer a predict_fn that returns "
        "one output for each sample"
    )


def _generated(trainer: Training, batch: Any, options: Mapping[str, Any]) -> torch.Tensor:
    """The tokens that the model generates from a batch without its labels: int64 [samples, tokens]."""
    if not isinstance(batch, Mapping):
        raise ValueError("predict_with_generate takes batches by name ({'input_ids': …}): collate them so")
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "decoder_input_ids")}
    tokens: torch.Tensor = trainer.parallel.generate(**inputs, **options)
    return tokens


def _every_rank_reads_labels(trainer: Training) -> bool:
    """Whether every rank reads all fields; with a pipeline, stages read only the fields that they use."""
    return trainer.parallel.plan.step.axes.get("pp", 1) == 1


def _loader(trainer: Training, dataset: Any, *, local: bool = False) -> DataLoader:
    """Global batches (or this data group's share of them) in order; the last one may be short."""
    return DataLoader(
        dataset,
        batches.DataGroup.of(trainer.parallel) if local else None,
        batch_size=trainer.global_batch,
        shuffle=False,
        # Groups do not know how long the samples of the others are.
        collate_fn=trainer.collator(longest=local),
        num_workers=trainer.loader_options.get("num_workers", 0),
        last="whole",
    )


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
