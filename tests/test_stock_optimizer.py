"""State of ordinary optimizers on one process: transformers' own checkpoints, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import TrainingArguments

import planner
from planner.integrations import transformers as hf
from runtime.torch_compat.dtensors import are_subclasses_dispatched
from tests.checkpoint_cases import StockTraining, compiled, two_groups
from tests.hugging_face_cases import llama

pytestmark = pytest.mark.usefixtures("models_traced_once")


def trained(kind: Any, folder: Path, optimizer: str, *, resume: Path | None = None, **options: Any) -> Any:
    """State after three steps, each of which has a checkpoint."""
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(96).reshape(12, 8) * 7 % 32]
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=4, max_steps=3, save_steps=1, learning_rate=1e-2, optim=optimizer,
        adam_epsilon=1e-3, report_to=[], use_cpu=True, disable_tqdm=True, save_total_limit=5,
    )  # fmt: skip
    trainer = kind(llama(), arguments, train_dataset=rows, **options)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume / "checkpoint-1"))
    return getattr(trainer.model, "full_state_dict", trainer.model.state_dict)()


ADAFACTOR = pytest.param(  # keeps statistics of rows and columns
    "adafactor",
    marks=pytest.mark.skipif(
        not are_subclasses_dispatched(), reason="torch 2.11 refuses on DTensors what Adafactor computes"
    ),
)


@pytest.mark.parametrize("optimizer", ["adamw_torch", ADAFACTOR])
def test_transformers_checkpoints_go_on_under_a_plan_and_ours_without(optimizer: str, tmp_path: Path) -> None:
    """Weights after three steps, the first of them by the other Trainer: as if all were by one."""
    expected = trained(transformers.Trainer, tmp_path / "stock", optimizer)
    ours = trained(hf.Trainer, tmp_path / "ours", optimizer, resume=tmp_path / "stock")
    trained(hf.Trainer, tmp_path / "whole", optimizer)
    stock = trained(transformers.Trainer, tmp_path / "again", optimizer, resume=tmp_path / "whole")
    for name, weight in expected.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-5, atol=1e-6, msg=name)
        torch.testing.assert_close(stock[name], weight, rtol=1e-5, atol=1e-6, msg=name)


def test_checkpoints_without_a_stock_state_are_refused_by_transformers(tmp_path: Path) -> None:
    trained(hf.Trainer, tmp_path / "ours", "adamw_torch", stock_state=False)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        trained(transformers.Trainer, tmp_path / "stock", "adamw_torch", resume=tmp_path / "ours")


def test_parameters_are_numbered_as_the_optimizer_was_given_them() -> None:
    """Weights of one shape are taken for each other else."""
    parallel = compiled("dp=1")
    stock = StockTraining(lambda groups: torch.optim.AdamW(groups, lr=0.05)).model
    backwards = [torch.optim.AdamW([*reversed([*model.parameters()])], lr=0.05) for model in (parallel, stock)]
    for parameter in stock.parameters():
        parameter.grad = torch.randn_like(parameter)
    backwards[1].step()
    planner.load_optimizer(parallel, backwards[0], backwards[1].state_dict())
    moments = {name: backwards[0].state[one]["exp_avg"] for name, one in parallel.named_parameters()}
    for name, parameter in stock.named_parameters():
        assert torch.equal(moments[name].full_tensor(), backwards[1].state[parameter]["exp_avg"]), name


def test_state_of_another_optimizer_or_model_is_refused(tmp_path: Path) -> None:
    parallel = compiled("dp=1")
    optimizer = torch.optim.AdamW(two_groups(parallel.named_parameters()), lr=0.05)
    stock = StockTraining(lambda groups: torch.optim.AdamW(groups, lr=0.05))
    stock.step(0)
    state = stock.optimizer.state_dict()

    def refused(source: Any, message: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            planner.load_optimizer(parallel, optimizer, source, **options)
        assert not optimizer.state

    (tmp_path / "text.pt").write_text("no tensors")
    refused(tmp_path / "text.pt", "text.pt is not a file of tensors and plain data")
    refused({"optimizer": state, "epoch": 1}, r"this is a mapping of \['epoch', 'optimizer'\]: give the part")
    sgd = StockTraining(lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)).optimizer.state_dict()
    refused(sgd, "of another optimizer: its parameter group 0 has no 'betas' and no 'eps'")
    one_group = torch.optim.AdamW(stock.model.parameters()).state_dict()
    refused(one_group, "the saved optimizer has 1 parameter groups, this one has 2: make the same groups")
    names = [[name for name, _ in stock.model.named_parameters() if ("norm" in name) == norm] for norm in (False, True)]
    refused(state, "has shape .*in another order", names=[names[0][::-1], names[1]])
    planner.load_optimizer(parallel, optimizer, state, names=names)
    assert len(optimizer.state) == len(state["state"])
