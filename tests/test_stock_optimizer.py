"""State of ordinary optimizers on one process: transformers' own checkpoints, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import planner
from planner.integrations import transformers as hf
from tests.checkpoint_cases import StockTraining, compiled, two_groups


def test_transformers_own_checkpoint_goes_on_under_a_plan(tmp_path: Path) -> None:
    """Weights after three steps, the first of them by transformers' Trainer: as if all were."""

    def trained(kind: Any, folder: str, **options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        samples = [{"input_ids": row, "labels": row} for row in torch.arange(96).reshape(12, 8) * 7 % 32]
        arguments = TrainingArguments(
            str(tmp_path / folder), per_device_train_batch_size=4, max_steps=3, save_steps=1, learning_rate=1e-2,
            adam_epsilon=1e-3, report_to=[], use_cpu=True, disable_tqdm=True, save_total_limit=5,
        )  # fmt: skip
        trainer = kind(GPT2LMHeadModel(config), arguments, train_dataset=samples)
        trainer.train(**options)
        state: dict[str, torch.Tensor] = getattr(trainer.model, "full_state_dict", trainer.model.state_dict)()
        return state

    expected = trained(transformers.Trainer, "stock")
    resumed = trained(hf.Trainer, "ours", resume_from_checkpoint=str(tmp_path / "stock" / "checkpoint-1"))
    for name, weight in expected.items():
        torch.testing.assert_close(resumed[name], weight, rtol=1e-5, atol=1e-6, msg=name)


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
