"""A Lightning script logs under a plan what it logs on one process, and goes on from either's checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning", reason="Lightning is an optional extra: pip install 'meshwright[lightning]'")

from planner.integrations.lightning import Strategy
from tests.hugging_face_cases import FULL
from tests.lightning_cases import Language, against, lightning_script
from tests.ranks import run_on_ranks


def test_a_script_logs_the_same_and_goes_on_from_either_checkpoint(tmp_path: Path) -> None:
    """Evaluated before it trains; accumulation, clipping, a schedule by steps. Both write the same checkpoint."""
    first = lightning_script(
        None, str(tmp_path / "first"), sizes=FULL, max_epochs=1, own_loss=False, precision="64-true"
    )
    first.save_checkpoint(tmp_path / "stock.ckpt")
    second = lightning_script(None, str(tmp_path / "second"), sizes=FULL, resume=str(tmp_path / "stock.ckpt"))
    logged = run_on_ranks("lightning_worker", 2, str(tmp_path))
    for name, runner in (("pp=2", first), ("resumed on tp=2", second)):
        expected = torch.tensor(runner.lightning_module.logged)
        torch.testing.assert_close(torch.tensor(logged[name]), expected, rtol=2e-6, atol=2e-8, msg=name)
    ours, stock = (torch.load(path, weights_only=False) for path in (logged["path"], tmp_path / "stock.ckpt"))
    torch.testing.assert_close(ours["state_dict"], stock["state_dict"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours["optimizer_states"], stock["optimizer_states"], rtol=1e-4, atol=1e-6)


def test_optimizers_that_are_stepped_by_hand_go_on_each_with_its_own_module(tmp_path: Path) -> None:
    """The state of one is taken before the other's module is called for the first time."""
    first = against(Strategy(mesh="dp=1"), str(tmp_path), epochs=1)
    first.save_checkpoint(tmp_path / "first.ckpt")
    second = against(Strategy(mesh="dp=1"), str(tmp_path), epochs=2, resume=str(tmp_path / "first.ckpt"))
    logged = first.lightning_module.logged + second.lightning_module.logged
    expected = against(None, str(tmp_path), epochs=2).lightning_module.logged
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(expected), rtol=1e-9, atol=0)


def test_what_lightning_cannot_have_is_refused() -> None:
    with pytest.raises(ValueError, match="Language has no module 'head': it has model"):
        Strategy(modules=("head",)).parts.plan(Language(), lambda module: module)  # type: ignore[arg-type, return-value]
