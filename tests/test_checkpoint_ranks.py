"""Checkpoints and weight files on four processes: any layout of pieces resumes any other's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from runtime.checkpoint import CheckpointManager
from tests.checkpoint_cases import Pieces, StockTraining, Training, state_is_right, trained_once, whole_pieces
from tests.ranks import run_on_ranks

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    yield folder, run_on_ranks("checkpoint_worker", 4, str(folder))


@pytest.mark.parametrize(
    "scenario",
    [
        "pieces_of_any_layout",
        "files_of_any_layout",
        "errors_reach_every_rank",
        "dropout_goes_on",
        "stock_optimizers_go_on",
    ],
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


def whole_tensors(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Whole tensors of a checkpoint, as docs/files.md says it is written: with safetensors and json alone."""
    metadata = json.loads((folder / "metadata.json").read_text())
    tensors = {}
    for name, entry in metadata["tensors"].items():
        if name.startswith(prefix):
            pieces = []
            for piece in entry["pieces"]:
                with safe_open(folder / piece["file"], "pt") as file:
                    pieces.append((piece, file.get_tensor(f"{name}[{','.join(map(str, piece['offsets']))}]")))
            whole = torch.full(entry["shape"], float("nan"), dtype=pieces[0][1].dtype)
            for piece, tensor in pieces:
                whole[tuple(slice(at, at + size) for at, size in zip(piece["offsets"], piece["sizes"]))] = tensor
            tensors[name.removeprefix(prefix)] = whole
    return tensors


def test_a_checkpoint_is_read_without_this_package(ran: tuple[Path, Any]) -> None:
    """What four ranks wrote becomes the state of a plain AdamW, which goes on as one device does."""
    folder = ran[0] / "plans_resume_each_other" / str(torch.float64) / "step-00000002"
    stock = StockTraining(lambda groups: torch.optim.AdamW(groups, lr=0.05))
    stock.model.load_state_dict(whole_tensors(folder, "model/"))
    groups = json.loads((folder / "rank-00000.json").read_text())["training/groups"]
    state = whole_tensors(folder, "optimizer/tensor/")
    order = [name for group in stock.optimizer.param_groups for name in names_of(stock.model, group["params"])]
    stock.optimizer.load_state_dict(
        {
            "state": {
                number: {key: state[f"{name}/{key}"] for key in ("exp_avg", "exp_avg_sq", "step")}
                for number, name in enumerate(order)
            },
            "param_groups": [
                {**group["options"], "betas": (0.9, 0.999), "params": [order.index(name) for name in names]}
                for group, names in zip(
                    groups, (names_of(stock.model, g["params"]) for g in stock.optimizer.param_groups)
                )
            ],
        }
    )
    losses = []
    for step in range(2, 5):
        losses.append(stock.step(step))
        for group in stock.optimizer.param_groups:
            group["lr"] *= 0.7
    assert losses == pytest.approx(ran[1]["plans_resume_each_other"][str(torch.float64)][0], rel=1e-9)


def names_of(model: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> list[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in parameters]
