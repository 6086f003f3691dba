"""Training scripts of three frameworks, each run with the framework's own class on one process, or with ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset

import planner
from benchmarks.tutorial_cells import TUTORIALS
from planner.integrations import transformers as hf
from planner.integrations.accelerate import Accelerator
from planner.verification.verify_model import slow_devices
from tests.hugging_face_cases import (
    BATCH,
    FULL,
    accelerated,
    arguments,
    figures,
    llama,
    lora,
    metrics,
    regression_script,
    samples,
    script,
    with_own_loss,
)

#: Mesh → another one of as many processes, on which a checkpoint goes on.
OTHERS = {"dp=2": "tp=2", "tp=2": "pp=2", "pp=2": "dp=2", "dp=2,tp=2": "pp=2,dp=2"}
ONCE = {"num_train_epochs": 1, "save_strategy": "no"}
#: What a script logs: (mesh or None for the framework's own class, folder) → numbers.
Cell = Callable[[str | None, str], list[float]]


def planned(mesh: str | None) -> dict[str, Any]:
    """Arguments of our classes: slow devices, so that tensors of a tiny model are really cut."""
    if mesh is None:
        return {}
    return {"mesh": mesh, "plan_options": {"cluster": slow_devices(dist.get_world_size())}}


def trained(mesh: str | None, folder: str, *, own_loss: bool = False, values: bool = False, **options: Any) -> Any:
    kind: Any = transformers.Trainer if mesh is None else hf.Trainer
    if own_loss:
        kind = with_own_loss(kind)
    size = BATCH if mesh is None else BATCH // dist.get_world_size()
    run = regression_script if values else script
    return run(kind, folder, size, **options, **planned(mesh))


def trainer(**options: Any) -> Cell:
    return lambda mesh, folder: figures(trained(mesh, folder, **options))


def trainer_with_adapters(mesh: str | None, folder: str) -> list[float]:
    return figures(trained(mesh, folder, model=lora()))


def trainer_resumed(mesh: str | None, folder: str) -> list[float]:
    """Two of four steps under the mesh, the rest under another one: as if nothing had happened."""
    whole = trained(mesh, folder)
    if mesh is None:
        return figures(whole)
    return figures(trained(OTHERS[mesh], f"{folder}-other", resume=str(Path(folder) / "checkpoint-2")))


def accelerate_loop(**options: Any) -> Cell:
    def run(mesh: str | None, folder: str) -> list[float]:
        kind = accelerate.Accelerator if mesh is None else Accelerator
        losses, predictions = accelerated(kind, **options, **planned_with_example(mesh))
        return [*losses, float(predictions)]

    return run


def accelerate_resumed(mesh: str | None, folder: str) -> list[float]:
    kind = accelerate.Accelerator if mesh is None else Accelerator
    accelerated(kind, own_loss=False, folder=folder, **planned_with_example(mesh))
    other = planned_with_example(mesh and OTHERS[mesh])
    losses, predictions = accelerated(kind, own_loss=False, resume=folder, **other)
    return [*losses, float(predictions)]


def planned_with_example(mesh: str | None) -> dict[str, Any]:
    options = planned(mesh)
    if mesh is not None:
        example = {name: torch.ones(BATCH, 6, dtype=torch.int64) for name in ("input_ids", "labels")}
        options["plan_options"]["example_inputs"] = example
    return options


def lightning_logged(**options: Any) -> Cell:
    def run(mesh: str | None, folder: str) -> list[float]:
        from tests.lightning_cases import lightning_script

        runner = lightning_script(mesh, folder, **options)
        return [*runner.lightning_module.logged, float(runner.callback_metrics["validation"])]

    return run


def lightning_resumed(mesh: str | None, folder: str) -> list[float]:
    """One of two epochs under the mesh, the other one under another mesh."""
    from tests.lightning_cases import lightning_script

    first = lightning_script(mesh, f"{folder}-first", max_epochs=1, own_loss=False)
    other = mesh and OTHERS[mesh]
    runner = lightning_script(other, folder, own_loss=False, resume=first.checkpoint_callback.best_model_path)
    logged: list[float] = runner.lightning_module.logged
    return logged


class Stream(IterableDataset[Any]):
    """Samples one after another, with no length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(samples(45))


def of_many_lengths(count: int) -> list[dict[str, Any]]:
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in samples(count)]
    return [{name: value[: 3 + index % 4] for name, value in row.items()} for index, row in enumerate(rows)]


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator as scripts have them: to the longest of the batch."""
    fill = {"input_ids": 0, "labels": -100}
    return {name: pad_sequence([row[name] for row in rows], True, fill[name]) for name in fill}


def trainer_on(dataset: Callable[[], Any], *, again: bool = False, **options: Any) -> Cell:
    """A trainer with other data, collators or callbacks; ``again``: evaluated and predicting after it trained."""

    def run(mesh: str | None, folder: str) -> list[float]:
        kind: Any = transformers.Trainer if mesh is None else hf.Trainer
        given = {
            name: value() if name == "callbacks" else value for name, value in options.items() if name != "changes"
        }
        size = BATCH if mesh is None else BATCH // dist.get_world_size()
        evaluated = of_many_lengths(13) if "data_collator" in options else samples(13)
        one = kind(
            llama(),
            arguments(folder, size, **options.get("changes", {})),
            train_dataset=dataset(),
            eval_dataset=evaluated,
            compute_metrics=metrics,
            **given,
            **planned(mesh),
        )
        one.train()
        more: list[float] = []
        if again:
            more = [one.evaluate()["eval_loss"], float(abs(one.predict(evaluated).predictions).mean())]
        return [*figures(one), *more, float(one.state.global_step)]

    return run


def adversaries(mesh: str | None, folder: str) -> list[float]:
    """Two models, one of which is frozen while the other one learns."""
    accelerator: Any = accelerate.Accelerator(cpu=True) if mesh is None else Accelerator(cpu=True, **planned(mesh))
    torch.manual_seed(4)
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    judge = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (maker, judge)]
    maker, judge, *optimizers = accelerator.prepare(maker, judge, *optimizers)
    losses = []
    for _ in range(4):
        noise, real = torch.randn(8, 4), torch.randn(8, 8)
        made = maker(noise)
        against = F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()
        accelerator.backward(against)
        optimizers[1].step()
        optimizers[1].zero_grad()
        judge.requires_grad_(False)
        loss = F.softplus(-judge(made)).mean()
        accelerator.backward(loss)
        optimizers[0].step()
        optimizers[0].zero_grad()
        judge.requires_grad_(True)
        losses += [float(against), float(loss)]
    return losses


def generated(mesh: str | None, folder: str) -> list[float]:
    """Tokens that ``planner.Trainer.predict`` gives, beside transformers' own ``generate``."""
    rows = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in samples(BATCH)]
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "num_beams": 2}
    if mesh is None:
        tokens = llama().generate(torch.stack([row["input_ids"] for row in rows]), **options)
    else:
        given: dict[str, Any] = {"global_batch": BATCH, "cluster": planned(mesh)["plan_options"]["cluster"]}
        trainer = planner.Trainer(
            llama(), mesh, collate_fn=transformers.default_data_collator, predict_with_generate=options, **given
        )
        tokens = torch.stack(trainer.predict(rows))
    return [float(token) for token in tokens.flatten()]


#: Framework → script → (cell, largest difference that is allowed, relative).
CELLS: dict[str, dict[str, tuple[Cell, float]]] = {
    "Trainer": {
        "accumulation, clipping, a short last batch": (trainer(), 2e-6),
        "bf16": (trainer(sizes=FULL, changes={**ONCE, "bf16": True}), 1e-2),
        "resumed on another mesh": (trainer_resumed, 2e-6),
        "label smoothing": (trainer(sizes=FULL, changes={**ONCE, "label_smoothing_factor": 0.1}), 2e-6),
        "compute_loss overridden": (trainer(own_loss=True, changes=ONCE), 2e-6),
        "own optimizer, best model at the end": (trainer(values=True), 2e-6),
        "LoRA": (trainer_with_adapters, 2e-6),
        "batches by length, own collator": (
            trainer_on(
                lambda: of_many_lengths(21),
                data_collator=padded,
                changes={**ONCE, "train_sampling_strategy": "group_by_length"},
            ),
            2e-6,
        ),
        "a stream, max_steps": (trainer_on(Stream, changes={"max_steps": 3, "save_strategy": "no"}), 2e-6),
        "last batch dropped, cosine, prediction": (
            trainer_on(
                lambda: samples(21),
                again=True,
                changes={**ONCE, "dataloader_drop_last": True, "lr_scheduler_type": "cosine", "warmup_steps": 2},
            ),
            2e-6,
        ),
        "early stopping, best model, one checkpoint": (
            trainer_on(
                lambda: samples(21),
                again=True,
                callbacks=lambda: [transformers.EarlyStoppingCallback(1)],
                changes={
                    "load_best_model_at_end": True,
                    "metric_for_best_model": "mean",
                    "greater_is_better": True,
                    "save_total_limit": 1,
                    "num_train_epochs": 4,
                },
            ),
            2e-6,
        ),
        "gradient checkpointing": (trainer(sizes=FULL, changes={**ONCE, "gradient_checkpointing": True}), 2e-6),
        "Adafactor": (trainer(sizes=FULL, changes={**ONCE, "optim": "adafactor"}), 2e-6),
    },
    "Tutorial": TUTORIALS,
    "planner.Trainer": {"predictions that are generated": (generated, 0.0)},
    "accelerate": {
        "accumulation, clipping": (accelerate_loop(own_loss=False), 2e-6),
        "own loss, accumulation, clipping": (accelerate_loop(), 2e-6),
        "bf16": (accelerate_loop(own_loss=False, mixed_precision="bf16"), 1e-2),
        "resumed on another mesh": (accelerate_resumed, 2e-6),
        "two models against each other": (adversaries, 2e-6),
    },
    "Lightning": {
        "accumulation, clipping, a short last batch": (lightning_logged(own_loss=False), 2e-6),
        "own loss, accumulation, clipping": (lightning_logged(), 2e-6),
        "bf16": (lightning_logged(own_loss=False, precision="bf16-mixed"), 1e-2),
        "ZeRO 3": (lightning_logged(fix={"zero": 3}), 2e-6),
        "resumed on another mesh": (lightning_resumed, 2e-6),
    },
}
