"""Training scripts as tutorials of transformers have them, for ``benchmarks.adoption``: a task each, and its habits.

Models are tiny and without dropout, so that what is logged can be compared; data are drawn from a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from planner.integrations import transformers as hf
from planner.verification.verify_model import slow_devices
from tests.generation_cases import model_named, training_batch
from tests.hugging_face_cases import BATCH, figures, llama

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def tokenizer() -> Any:
    """Words "w0" … "w63", by the library that fast tokenizers are made of."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2, **{f"w{number}": number for number in range(3, 64)}}
    fast = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]"
    )


def sentences(count: int, shortest: int = 3, longest: int = 7) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(5)
    rows = []
    for number in range(count):
        length = shortest + number % (longest - shortest + 1)
        tokens = torch.randint(3, 64, (length,), generator=generator).tolist()
        rows.append({"input_ids": tokens, "attention_mask": [1] * length})
    return rows


def encoder(kind: Any, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=64, max_position_embeddings=16, **SIZES, **NO_DROPOUT, **changes)
    return kind(config)


def script(
    mesh: str | None,
    folder: str,
    model: Any,
    train: Any,
    evaluated: Any = None,
    *,
    changes: dict[str, Any] | None = None,
    sub: Callable[[Any], Any] = lambda kind: kind,
    seq2seq: bool = False,
    **options: Any,
) -> Any:
    """A trainer of the framework's own, or (with a mesh) of ours, that has trained."""
    stock: Any = transformers.Seq2SeqTrainer if seq2seq else transformers.Trainer
    ours: Any = hf.Seq2SeqTrainer if seq2seq else hf.Trainer
    kind = sub(stock if mesh is None else ours)
    size = BATCH if mesh is None else BATCH // dist.get_world_size()
    if mesh is not None:
        options |= {"mesh": mesh, "plan_options": {"cluster": slow_devices(dist.get_world_size())}}
    arguments = transformers.Seq2SeqTrainingArguments if seq2seq else transformers.TrainingArguments
    trainer = kind(
        model,
        arguments(
            output_dir=folder, per_device_train_batch_size=size, per_device_eval_batch_size=size, learning_rate=1e-2,
            logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, log_level="error",
            **{"num_train_epochs": 1, "save_strategy": "no", **(changes or {})},
        ),
        train_dataset=train, eval_dataset=evaluated, **options,
    )  # fmt: skip
    trainer.train()
    return trainer


def logged(trainer: Any) -> list[float]:
    """What ``figures`` gives, and every other metric of evaluations."""
    records = [(name, value) for record in trainer.state.log_history for name, value in sorted(record.items())]
    plain = ("_runtime", "_per_second", "eval_loss", "eval_mean")
    metrics = [value for name, value in records if name.startswith("eval_") and not name.endswith(plain)]
    return [*figures(trainer), *map(float, metrics)]


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def sentence_classes(mesh: str | None, folder: str) -> list[float]:
    """GLUE: padding by the collator, evaluation by steps, the best model at the end, predictions."""
    rows = [{**row, "label": number % 3} for number, row in enumerate(sentences(21))]
    trainer = script(
        mesh, folder, encoder(transformers.BertForSequenceClassification, num_labels=3), rows, rows[:13],
        data_collator=transformers.DataCollatorWithPadding(tokenizer()), compute_metrics=accuracy,
        changes={"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
                 "num_train_epochs": 2, "load_best_model_at_end": True, "metric_for_best_model": "accuracy",
                 "weight_decay": 0.01, "warmup_steps": 2},
    )  # fmt: skip
    predicted = trainer.predict(rows[:5])
    return [*logged(trainer), float(abs(predicted.predictions).mean()), float(predicted.predictions.shape[0])]


def several_labels(mesh: str | None, folder: str) -> list[float]:
    """Labels that do not exclude each other, and class probabilities by a sigmoid."""
    options = {"num_labels": 4, "problem_type": "multi_label_classification"}
    rows = [{**row, "labels": [float((number >> bit) & 1) for bit in range(4)]}
            for number, row in enumerate(sentences(24, 5, 5))]  # fmt: skip

    def exact(predicted: Any) -> dict[str, float]:
        return {"exact": float(((predicted.predictions > 0) == predicted.label_ids).mean())}

    model = encoder(transformers.BertForSequenceClassification, **options)
    return logged(
        script(mesh, folder, model, rows, rows[:9], compute_metrics=exact, changes={"eval_strategy": "epoch"})
    )


def words_classes(mesh: str | None, folder: str) -> list[float]:
    """Named entities: labels padded with −100, which metrics leave out."""
    rows = [{**row, "labels": [-100 if place == 0 else (place + number) % 5 for place in range(len(row["input_ids"]))]}
            for number, row in enumerate(sentences(21))]  # fmt: skip

    def valid(predicted: Any) -> dict[str, float]:
        kept = predicted.label_ids != -100
        return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids)[kept].mean())}

    return logged(script(
        mesh, folder, encoder(transformers.BertForTokenClassification, num_labels=5), rows, rows[:11],
        data_collator=transformers.DataCollatorForTokenClassification(tokenizer()), compute_metrics=valid,
        changes={"eval_strategy": "epoch", "gradient_accumulation_steps": 2, "dataloader_drop_last": True},
    ))  # fmt: skip


def masked_words(mesh: str | None, folder: str) -> list[float]:
    """Masked language modelling: the collator draws what is masked."""
    collator = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.4)
    rows = sentences(24)
    return logged(script(mesh, folder, encoder(transformers.BertForMaskedLM), rows, rows[:8], data_collator=collator,
                         changes={"max_grad_norm": 0.3, "eval_strategy": "epoch"}))  # fmt: skip


def pictures(mesh: str | None, folder: str) -> list[float]:
    """ViT: columns that the collator reads, augmented by chance, the backbone frozen but for its last layer."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **SIZES, **NO_DROPOUT)
    model = transformers.ViTForImageClassification(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layer.1" in name or "classifier" in name
    generator = torch.Generator().manual_seed(2)
    rows = [{"image": torch.randn(1, 8, 8, generator=generator), "class": number % 3} for number in range(21)]

    def augmented(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        images = [one["image"].flip(-1) if torch.rand(()) < 0.5 else one["image"] for one in samples]
        return {"pixel_values": torch.stack(images), "labels": torch.tensor([one["class"] for one in samples])}

    return logged(script(mesh, folder, model, rows, rows[:9], data_collator=augmented, compute_metrics=accuracy,
                         changes={"remove_unused_columns": False, "eval_strategy": "epoch"}))  # fmt: skip


def translation(mesh: str | None, folder: str) -> list[float]:
    """T5 whose evaluations generate."""
    batch = training_batch("t5")
    rows = [{name: tensor[number % 2].roll(number) for name, tensor in batch.items()} for number in range(16)]

    def metrics(predicted: Any) -> dict[str, float]:
        return {"tokens": float(numpy.where(predicted.predictions < 0, 0, predicted.predictions).sum())}

    changes = {"predict_with_generate": True, "generation_max_length": 8, "eval_strategy": "epoch"}
    torch.manual_seed(0)
    config = model_named("t5").config
    config.dropout_rate = 0.0
    model = transformers.T5ForConditionalGeneration(config)
    return logged(script(mesh, folder, model, rows, rows[:8], seq2seq=True, compute_metrics=metrics,
                         changes=changes))  # fmt: skip


def packed_chat(mesh: str | None, folder: str) -> list[float]:
    """Supervised fine-tuning: samples joined into rows of one length, prompts left out of the loss."""
    tokens = [token for row in sentences(80) for token in row["input_ids"]]
    chunks = [torch.tensor(tokens[start : start + 16]) for start in range(0, len(tokens) - 15, 16)]
    rows = [{"input_ids": one, "labels": one.masked_fill(torch.arange(16) % 8 < 3, -100),
             "position_ids": torch.arange(16) % 8} for one in chunks]  # fmt: skip
    changes = {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine", "optim": "adamw_torch_fused",
               "gradient_checkpointing": True, "max_grad_norm": 1.0}  # fmt: skip
    return logged(script(mesh, folder, llama(), rows, changes=changes))


class Averages(transformers.TrainerCallback):  # type: ignore[misc]
    """A moving average of all parameters, and what callbacks read of the model."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.norms: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.shadow = {name: one.detach().clone() for name, one in model.named_parameters()}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name, one in model.named_parameters():
            self.shadow[name].mul_(0.9).add_(one.detach(), alpha=0.1)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            for name, one in model.named_parameters():
                one.copy_(self.shadow[name])


def averaged(mesh: str | None, folder: str) -> list[float]:
    """The weights' moving average, by a callback, evaluated in the end."""
    rows = [{**row, "labels": row["input_ids"]} for row in sentences(24, 6, 6)]
    trainer = script(mesh, folder, llama(), rows, rows[:8], callbacks=[Averages()], changes={"num_train_epochs": 2})
    return [*logged(trainer), trainer.evaluate()["eval_loss"]]


class Gradients(transformers.TrainerCallback):  # type: ignore[misc]
    """The norm of the gradients of the first layers, and how many parameters train."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name, one in model.named_parameters():
            if one.grad is not None and "layers.0.self_attn.q_proj" in name:
                self.seen.append(float(one.grad.norm()))
        self.seen.append(float(sum(one.numel() for one in model.parameters() if one.requires_grad)))


def watched(mesh: str | None, folder: str) -> list[float]:
    """A callback that reads gradients; SGD by name, a plateau schedule, several sets to evaluate."""
    rows = [{**row, "labels": row["input_ids"]} for row in sentences(24, 6, 6)]
    trainer = script(
        mesh, folder, llama(), rows, {"short": rows[:8], "all": rows}, callbacks=[Gradients()],
        changes={"optim": "sgd", "eval_strategy": "epoch", "num_train_epochs": 2,
                 "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "short_loss"},
    )  # fmt: skip
    seen = next(one for one in trainer.callback_handler.callbacks if isinstance(one, Gradients)).seen
    return [*logged(trainer), *seen]


def weighted(kind: Any) -> Any:
    """Classes weighed in the loss, drawn by a sampler, with a loader of the script's own."""

    class Weighted(kind):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            weights = torch.tensor([1.0, 2.0, 0.5], device=outputs.logits.device)
            loss = nn.CrossEntropyLoss(weight=weights)(outputs.logits.view(-1, 3), labels.view(-1))
            return (loss, outputs) if return_outputs else loss

        def get_train_dataloader(self) -> Any:
            sampler = WeightedRandomSampler([1.0 + number % 3 for number in range(len(self.train_dataset))], 16)
            loader = DataLoader(
                self.train_dataset, self.args.train_batch_size, sampler=sampler, collate_fn=self.data_collator
            )
            return self.accelerator.prepare(loader)

    return Weighted


def weighted_classes(mesh: str | None, folder: str) -> list[float]:
    rows = [{**row, "labels": number % 3} for number, row in enumerate(sentences(24, 5, 5))]
    model = encoder(transformers.BertForSequenceClassification, num_labels=3)
    return logged(script(mesh, folder, model, rows, rows[:11], sub=weighted, compute_metrics=accuracy,
                         changes={"num_train_epochs": 2, "eval_strategy": "epoch"}))  # fmt: skip


def taught(kind: Any) -> Any:
    """A small model learns from a larger one's logits."""

    class Taught(kind):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(**inputs)
            with torch.no_grad():
                goal = self.teacher(input_ids=inputs["input_ids"]).logits
            heat = 2.0
            soft = F.kl_div(F.log_softmax(outputs.logits / heat, -1), F.softmax(goal / heat, -1), reduction="batchmean")
            loss = 0.5 * outputs.loss + 0.5 * heat**2 * soft
            return (loss, outputs) if return_outputs else loss

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            torch.manual_seed(8)
            config = transformers.BertConfig(
                vocab_size=64, max_position_embeddings=16, num_labels=3, **SIZES, **NO_DROPOUT
            )
            self.teacher = transformers.BertForSequenceClassification(config).eval().requires_grad_(False)
            super().__init__(*args, **kwargs)

    return Taught


def distilled(mesh: str | None, folder: str) -> list[float]:
    rows = [{**row, "labels": number % 3} for number, row in enumerate(sentences(24, 5, 5))]
    rows = [{name: value for name, value in row.items() if name != "attention_mask"} for row in rows]
    model = encoder(transformers.BertForSequenceClassification, num_labels=3)
    return logged(script(mesh, folder, model, rows, rows[:8], sub=taught, changes={"eval_strategy": "epoch"}))


class Lines(IterableDataset[Any]):
    """A file read line by line."""

    def __iter__(self) -> Iterator[Any]:
        for row in sentences(1000, 6, 6):
            yield {**row, "labels": row["input_ids"]}


def stream(mesh: str | None, folder: str) -> list[float]:
    """Samples without an end, smoothed labels, steps that are counted, a checkpoint that it goes on from."""
    changes = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
               "label_smoothing_factor": 0.1}  # fmt: skip
    rows = [{**row, "labels": row["input_ids"]} for row in sentences(9, 6, 6)]
    first = script(mesh, folder, llama(), Lines(), rows, changes={**changes, "max_steps": 2})
    second = script(mesh, folder, llama(), Lines(), rows, changes=changes, sub=lambda kind: _resuming(kind))
    return [*logged(first), *logged(second)]


def _resuming(kind: Any) -> Any:
    class Resuming(kind):  # type: ignore[misc]
        def train(self, *args: Any, **kwargs: Any) -> Any:
            return super().train(resume_from_checkpoint=True)

    return Resuming


def layers_rates(mesh: str | None, folder: str) -> list[float]:
    """A learning rate for each layer, by an optimizer of the script's own; noise at the embeddings is not used."""
    model = encoder(transformers.BertForSequenceClassification, num_labels=3)
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        depth = 2 if "classifier" in name or "pooler" in name else int("layer.1" in name)
        groups.setdefault(1e-2 * 0.5 ** (2 - depth), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": some, "lr": rate} for rate, some in groups.items()])
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 1, 6)
    rows = [{**row, "labels": number % 3} for number, row in enumerate(sentences(24, 5, 5))]
    changes = {
        "num_train_epochs": 2,
        "eval_strategy": "epoch",
        "eval_accumulation_steps": 1,
        "dataloader_num_workers": 1,
    }
    return logged(script(mesh, folder, model, rows, rows[:11], optimizers=(optimizer, schedule),
                         compute_metrics=accuracy, changes=changes))  # fmt: skip


#: Task → (cell, largest difference that is allowed, relative).
TUTORIALS: dict[str, tuple[Callable[[str | None, str], list[float]], float]] = {
    "classes of sentences, padded, best model": (sentence_classes, 2e-6),
    "several labels": (several_labels, 2e-6),
    "classes of words": (words_classes, 2e-6),
    "masked words": (masked_words, 2e-6),
    "pictures, augmented, frozen layers": (pictures, 2e-6),
    "translation, generating evaluations": (translation, 2e-6),
    "packed chat, checkpointed": (packed_chat, 2e-6),
    "moving average by a callback": (averaged, 2e-6),
    "callback that reads gradients, plateau": (watched, 2e-6),
    "own loss, sampler and loader": (weighted_classes, 2e-6),
    "distilled from a teacher": (distilled, 2e-6),
    "stream, resumed": (stream, 2e-6),
    "rates by layer, workers": (layers_rates, 2e-6),
}
