"""A Lightning script as its author wrote it: run on one process, and with our strategy."""

from __future__ import annotations

import logging
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from planner.integrations.lightning import Strategy
from planner.verification.verify_model import slow_devices
from tests.hugging_face_cases import BATCH, llama, samples


class Language(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, *, own_loss: bool = True) -> None:
        super().__init__()
        self.model = llama()
        #: Some scripts make it with the module, others when they are asked for it.
        self.optimizer = None if own_loss else torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.own_loss = own_loss
        self.rows = SumMetric()
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
        self.rows.update(len(batch["input_ids"]))
        self.log("validation", loss)
        self.logged.append(float(loss))

    def on_validation_epoch_end(self) -> None:
        self.logged.append(float(self.rows.compute()))
        self.rows.reset()

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer or torch.optim.AdamW(self.parameters(), lr=1e-2)
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
        planned = {"cluster": slow_devices(dist.get_world_size())}  # else so small a model is whole on every rank
        options["strategy"] = Strategy(mesh=mesh, plan_options={**planned, **({"fix": fix} if fix else {})})
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


class Against(lightning.LightningModule):  # type: ignore[misc]
    """Two modules with an optimizer each, stepped by hand, each frozen while the other one learns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.maker, self.judge = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()
        self.logged: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        of_maker, of_judge = self.optimizers()
        for optimizer, loss_of in (
            (of_judge, lambda: nn.functional.softplus(self.judge(batch)).mean()),
            (of_judge, lambda: nn.functional.softplus(self.judge(self.maker(batch).detach())).mean()),
            (of_maker, lambda: nn.functional.softplus(-self.judge(self.maker(batch))).mean()),
        ):
            self.toggle_optimizer(optimizer)
            loss = loss_of()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.logged.append(float(loss))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.maker.parameters(), lr=0.1), torch.optim.AdamW(self.judge.parameters(), lr=0.1)


def against(strategy: Any, folder: str, *, epochs: int, resume: str | None = None) -> Any:
    """A trainer that has trained ``Against``."""
    options = {} if strategy is None else {"strategy": strategy}
    runner = lightning.Trainer(
        default_root_dir=folder, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, max_epochs=epochs, **options,
    )  # fmt: skip
    rows = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(12, 4)
    runner.fit(Against(), DataLoader(rows, batch_size=4), ckpt_path=resume)  # type: ignore[arg-type]
    return runner
