"""A Lightning script as its author wrote it: run on one process, and with our strategy."""

from __future__ import annotations

import logging
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from planner.integrations.lightning import Strategy
from tests.hugging_face_cases import BATCH, llama, samples


class Language(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, *, own_loss: bool = True) -> None:
        super().__init__()
        self.model = llama()
        self.own_loss = own_loss
        self.logged: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        outputs = self.model(**batch)
        loss: torch.Tensor = outputs.loss
        if self.own_loss:
            loss = loss + 1e-2 * outputs.logits.square().mean()
        self.log("train", loss)
        self.logged.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        loss = self.model(**batch).loss
        self.log("validation", loss)
        self.logged.append(float(loss))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def lightning_script(
    mesh: str | None,
    folder: str,
    *,
    resume: str | None = None,
    sizes: tuple[int, int] = (29, 13),
    fix: dict[str, Any] | None = None,
    own_loss: bool = True,
    **options: Any,
) -> Any:
    """Accumulation over two batches, clipping, a schedule, evaluations; the trainer."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    size = BATCH
    if mesh is not None:
        size //= dist.get_world_size()
        options["strategy"] = Strategy(mesh=mesh, plan_options={"fix": fix} if fix else None)
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in samples(max(sizes))]
    lightning.seed_everything(3, verbose=False)
    runner = lightning.Trainer(
        default_root_dir=folder, accelerator="cpu", devices=1, accumulate_grad_batches=2, gradient_clip_val=0.5,
        logger=False, enable_progress_bar=False, enable_model_summary=False, **{"max_epochs": 2, **options},
    )  # fmt: skip
    model = Language(own_loss=own_loss)
    loaders = DataLoader(rows[: sizes[0]], batch_size=size, shuffle=True), DataLoader(rows[: sizes[1]], batch_size=size)
    runner.fit(model, *loaders, ckpt_path=resume)
    return runner
