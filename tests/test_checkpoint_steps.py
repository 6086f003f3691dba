"""Plans of whole steps (pipelines, ZeRO, micro-batches) resume each other's checkpoints; so does one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import planner
from passes.capture import keep_float64
from runtime.checkpoint import CheckpointManager
from tests.parity_worker import build
from tests.patience import PATIENCE
from tests.ranks import run_on_ranks

#: Four stages are embeddings, two layers and what is behind them.
MODEL, LAYERS = "tiny-gpt2", 2
PLANS = {
    "dp4 zero 3 in pairs": {"pp": 1, "dp": 4, "tp": 1, "zero": 3, "zero_ranks": 2},
    "dp2 tp2 zero 1": {"pp": 1, "dp": 2, "tp": 2, "zero": 1},
    "pp4": {"pp": 4, "dp": 1, "tp": 1, "num_microbatches": 4},
    "dp4 zero 3": {"pp": 1, "dp": 4, "tp": 1, "zero": 3},
    "dp4 zero 1 in pairs": {"pp": 1, "dp": 4, "tp": 1, "zero": 1, "zero_ranks": 2},
}


def test_each_goes_on_with_the_losses_of_the_first(tmp_path: Path) -> None:
    payload = {"folder": str(tmp_path), "model": MODEL, "layers": LAYERS, "plans": PLANS}
    losses = run_on_ranks("checkpoint_steps_worker", 4, payload, timeout=PATIENCE)
    first, *others = losses.values()
    assert len(others) == len(PLANS) - 1
    single, args, kwargs, loss_fn = build(MODEL, layers=LAYERS)
    with keep_float64():
        parallel = planner.compile(single, "dp=1", loss_fn=loss_fn, example_inputs=args or kwargs)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
        CheckpointManager(tmp_path / "checkpoints").load(parallel, optimizer, step=2)
        alone = []
        for _ in range(2):
            alone.append(float(parallel.train_step(*args, **kwargs)))
            optimizer.step()
            optimizer.zero_grad()
    for resumed in (*others, [*alone, first[0]]):
        assert resumed == pytest.approx(first, rel=1e-9)
    assert first[2] == pytest.approx(first[0], rel=1e-9)
