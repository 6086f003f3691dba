"""Checkpoints and weight files on four processes: any layout of pieces resumes any other's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint import CheckpointManager
from tests.checkpoint_cases import Pieces, Training, state_is_right, trained_once, whole_pieces
from tests.ranks import run_on_ranks

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    yield folder, run_on_ranks("checkpoint_worker", 4, str(folder))


@pytest.mark.parametrize(
    "scenario", ["pieces_of_any_layout", "files_of_any_layout", "errors_reach_every_rank", "dropout_goes_on"]
)
def test_scenario(ran: tuple[Path, Any], scenario: str) -> None:
    assert ran[1][scenario]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_checkpoint_of_dp2_tp2_resumes_on_other_meshes_and_on_one_process(
    ran: tuple[Path, Any], dtype: torch.dtype
) -> None:
    folder, results = ran
    expected, *others = results["plans_resume_each_other"][str(dtype)]
    single = Training("dp=1", dtype=dtype)
    manager = CheckpointManager(folder / "plans_resume_each_other" / str(dtype))
    manager.load(single.parallel, single.optimizer, scheduler=single.scheduler, step=2)
    for losses in (*others, single.losses(range(2, 5))):
        assert losses == pytest.approx(expected, rel=TOLERANCE[dtype])


def test_a_checkpoint_of_four_ranks_loads_in_one_process(ran: tuple[Path, Any]) -> None:
    for number in ("0", "1"):
        model = Pieces(whole_pieces(), seed=None)
        optimizer = trained_once(model)
        optimizer.state.clear()
        CheckpointManager(ran[0] / "pieces_of_any_layout" / number).load(model, optimizer)
        assert model.holds(seed=3) and state_is_right(model, optimizer)
