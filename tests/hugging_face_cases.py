"""Scripts with a ``transformers.Trainer``, as their authors wrote them: run with it, and with ours in its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import DataLoaderConfiguration
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)

from tests.generation_cases import model_named, training_batch

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
#: Samples of a global batch.
BATCH = 8
#: Of training and evaluation, so that every batch is full: one program each.
FULL = (3 * BATCH, BATCH)


def config(*, num_layers: int = 1, **changes: Any) -> LlamaConfig:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaConfig(**SIZES, **heads, num_hidden_layers=num_layers, pad_token_id=0, **changes)


def llama(*, num_layers: int = 1) -> LlamaForCausalLM:
    """Of few layers: tracing is most of what a script takes here."""
    torch.manual_seed(0)
    return LlamaForCausalLM(config(num_layers=num_layers))


def regression() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(config(num_labels=1, problem_type="regression"))


def lora() -> PeftModel:
    """Adapters beside frozen weights, on either of two stages; both of their matrices are far from zero."""
    model = llama(num_layers=2)
    torch.manual_seed(1)
    options = {"r": 4, "lora_dropout": 0.0, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], **options))


def samples(count: int, *, values: bool = False) -> list[dict[str, Any]]:
    """Sequences of tokens with some labels ignored, or with a number each."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(count):
        tokens = torch.randint(1, 64, (6,), generator=generator)
        labels = tokens.clone()
        labels[: index % 4] = -100
        rows.append({"input_ids": tokens, "labels": tokens.float().mean() / 64 if values else labels, "name": "unused"})
    return rows


def arguments(folder: str | Path, batch_size: int, **changes: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "per_device_train_batch_size": batch_size, "per_device_eval_batch_size": batch_size,
        "gradient_accumulation_steps": 2, "num_train_epochs": 2, "max_grad_norm": 0.5, "learning_rate": 1e-2,
        "weight_decay": 0.1, "warmup_steps": 1, "logging_steps": 1, "eval_strategy": "epoch", "save_strategy": "epoch",
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "log_level": "error",
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**options, **changes})


def figures(trainer: Any) -> list[float]:
    """All that was logged: losses, norms, learning rates, evaluations."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_mean")
    return [record[name] for record in trainer.state.log_history for name in names if name in record]


def metrics(predicted: Any) -> dict[str, float]:
    return {"mean": float(abs(predicted.predictions).mean()), "rows": len(predicted.predictions)}


def script(trainer_class: Any, folder: str, batch_size: int, resume: str | None = None, **options: Any) -> Any:
    """Language modelling: the last batch is short, accumulation is over two batches, norms are clipped."""
    changes = options.pop("changes", {})
    num_train, num_evaluated = options.pop("sizes", (21, 13))
    trainer = trainer_class(
        options.pop("model", None) or llama(),
        arguments(folder, batch_size, **changes),
        train_dataset=samples(num_train),
        eval_dataset=samples(num_evaluated),
        compute_metrics=metrics,
        **options,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def evaluation_order(trainer_class: Any, folder: str, batch_size: int) -> list[int]:
    """Of samples that are grouped by length."""
    options = arguments(folder, batch_size, train_sampling_strategy="group_by_length", eval_strategy="no")
    rows = [{"input_ids": [1] * (1 + 7 * index % 13)} for index in range(13)]
    return [*trainer_class(llama(), options)._get_eval_sampler(rows)]


def regression_script(trainer_class: Any, folder: str, batch_size: int, **options: Any) -> Any:
    """Numbers as labels, two groups of the script's own optimizer, evaluated first, the best weights at the end."""
    model = regression()
    head = [*model.score.parameters()]
    groups = [{"params": head, "lr": 1e-2}, {"params": [*model.model.parameters()], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    trainer = trainer_class(
        model,
        arguments(folder, batch_size, load_best_model_at_end=True, num_train_epochs=1),
        train_dataset=samples(21, values=True),
        eval_dataset=samples(13, values=True),
        optimizers=(optimizer, schedule),
        **options,
    )
    trainer.train()
    trainer.evaluate()
    return trainer


def translated(trainer_class: Any, folder: str, batch_size: int, **options: Any) -> tuple[list[list[int]], float]:
    """What T5 generates from three samples, and their loss."""
    generating = {"predict_with_generate": True, "generation_max_length": 8, "generation_num_beams": 2}
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "log_level": "error"}
    size = {"per_device_eval_batch_size": batch_size}
    trainer = trainer_class(
        model_named("t5"), Seq2SeqTrainingArguments(folder, **size, **generating, **quiet), **options
    )
    batch = training_batch("t5")
    rows = [{name: tensor[index % 2].roll(index) for name, tensor in batch.items()} for index in range(3)]
    predicted = trainer.predict(rows)
    return predicted.predictions.tolist(), predicted.metrics["test_loss"]


def accelerated(
    accelerator_class: Any,
    *,
    folder: str | None = None,
    resume: str | None = None,
    own_loss: bool = True,
    **options: Any,
) -> tuple[list[float], int]:
    """A loop of accelerate's: losses of an epoch, and how many predictions its evaluation has."""
    loading = DataLoaderConfiguration(split_batches=True)
    accelerator = accelerator_class(cpu=True, gradient_accumulation_steps=2, dataloader_config=loading, **options)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in samples(21)]
    torch.manual_seed(2)
    loader = DataLoader(rows, batch_size=BATCH, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if resume is not None:
        accelerator.load_state(resume)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            if own_loss:
                loss = loss + outputs.logits.square().mean()  # which knows no label to ignore
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach()).mean()))
    if folder is not None:
        accelerator.save_state(folder)
    predictions = 0
    with torch.no_grad():
        for batch in accelerator.prepare(DataLoader(rows, batch_size=BATCH)):
            predictions += len(accelerator.gather_for_metrics(model(**batch).logits))
    return losses, predictions


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


class SeveralLoaders:
    """Loaders after one another, as scripts write them: there is no ``dataset``."""

    def __init__(self, *loaders: Any) -> None:
        self.loaders = loaders

    def __len__(self) -> int:
        return sum(map(len, self.loaders))

    def __iter__(self) -> Iterator[Any]:
        for loader in self.loaders:
            yield from loader


def evaluated(trainer_class: Any, folder: str) -> list[dict[str, float]]:
    """Metrics of a stream with a short end, and of two loaders that have no dataset in common."""
    streamed, joined = (
        trainer_class(llama(), arguments(folder, BATCH), eval_dataset=dataset, compute_metrics=metrics)
        for dataset in (Stream(samples(13)), samples(5))
    )
    loaders = SeveralLoaders(*(joined.get_eval_dataloader(samples(count)) for count in (13, 9)))
    results = (streamed.evaluate(), joined.evaluation_loop(loaders, "Evaluation").metrics)
    return [{name: result[f"eval_{name}"] for name in ("loss", "mean", "rows")} for result in results]


def with_own_loss(trainer_class: Any) -> Any:
    """A subclass as scripts have them."""

    class OwnLoss(trainer_class):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
            loss = loss / num_items_in_batch + outputs.logits.square().mean()
            return (loss, outputs) if return_outputs else loss

    return OwnLoss
