"""Checkpoints in one process: what comes back, what is refused, what a failing or killed save leaves."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import planner
from passes.ir.types import MeshShape
from runtime.checkpoint import CheckpointManager, folder_storage
from runtime.checkpoint import directory as folders
from runtime.mesh.virtual import virtual_mesh
from tests.checkpoint_cases import (
    Pieces,
    Training,
    state_is_right,
    trained_once,
    two_dims,
    whole_pieces,
)
from tests.patience import PATIENCE
from tests.ranks import ROOT
from tests.small_models import Mlp, seeded, squared_error


def test_training_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    first, again = (Training("dp=1", dropout=True) for _ in range(2))
    for step, asynchronous in ((2, False), (6, True)):
        manager = CheckpointManager(tmp_path, asynchronous=asynchronous)
        first.losses(range(step - 2, step))
        manager.save(first.parallel, first.optimizer, step=step, scheduler=first.scheduler)
        expected = first.losses(range(step, step + 2))
        again.losses(range(1))
        loaded = manager.load(again.parallel, again.optimizer, scheduler=again.scheduler)
        assert loaded.step == step
        assert again.losses(range(step, step + 2)) == expected


def test_averages_of_the_weights_come_back_and_are_as_many_as_were_saved(tmp_path: Path) -> None:
    first, again = (Training("dp=1") for _ in range(2))
    averages = [{name: factor * one.detach() for name, one in first.parallel.named_parameters()} for factor in (2, 3)]
    manager = CheckpointManager(tmp_path)
    manager.save(first.parallel, step=1, averages=averages)
    loaded: list[dict[str, torch.Tensor]] = [{}, {"other": torch.ones(1)}]
    manager.load(again.parallel, averages=loaded)
    for own, wanted in zip(loaded, averages, strict=True):
        assert own.keys() == wanted.keys()
        for name, one in again.parallel.named_parameters():
            assert torch.equal(own[name], wanted[name])
            assert getattr(own[name], "placements", None) == getattr(one, "placements", None)
    manager.load(again.parallel)
    with pytest.raises(ValueError, match="has 2 averages of the weights, 1 are asked for"):
        manager.load(again.parallel, averages={})
    with pytest.raises(ValueError, match="the averages have 'other' of shape"):
        manager.save(first.parallel, step=2, averages={"other": torch.ones(1)})


def test_what_lies_on_the_host_does_so_whatever_the_default_device(tmp_path: Path) -> None:
    """A script on GPUs may say ``torch.set_default_device("cuda")``; tensors of meta have no bytes to read into."""
    first, again = (Training("dp=1") for _ in range(2))
    manager = CheckpointManager(tmp_path)
    first.losses(range(1))
    again.losses(range(1, 2))
    with torch.device("meta"):
        manager.save(first.parallel, first.optimizer, step=1, scheduler=first.scheduler)
        manager.load(again.parallel, again.optimizer, scheduler=again.scheduler)
    assert again.losses(range(1, 3)) == first.losses(range(1, 3))


def test_data_extra_and_random_states_come_back(tmp_path: Path) -> None:
    class Data:
        position = 3

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.position = state["position"]

    manager, data = CheckpointManager(tmp_path), Data()
    manager.save(Pieces(whole_pieces()), step=1, data=data, extra={"best": 0.5})
    drawn = (random.random(), np.random.rand(), torch.rand(()))
    data.position = 9
    loaded = manager.load(Pieces(whole_pieces()), data=data)
    assert (random.random(), np.random.rand(), torch.rand(())) == drawn
    assert data.position == 3 and loaded.data == {"position": 3} and loaded.extra == {"best": 0.5}


def test_models_on_meta_get_memory_and_optimizers_their_state(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    model = Pieces(whole_pieces())
    optimizer = trained_once(model)
    manager.save(model, optimizer, step=1)
    empty = Pieces(whole_pieces(), seed=None)
    empty.parameters = {
        name: torch.nn.Parameter(torch.empty_like(parameter, device="meta"))
        for name, parameter in empty.parameters.items()
    }
    held = dict(empty.parameters)
    other = torch.optim.AdamW([{"params": list(held.values())[::2]}, {"params": list(held.values())[1::2]}])
    manager.load(empty, other)
    assert all(empty.parameters[name] is held[name] for name in held)
    assert all(torch.equal(held[name], parameter) for name, parameter in model.parameters.items())
    assert state_is_right(empty, other) and empty.changes == 1
    assert [group["weight_decay"] for group in other.param_groups] == [0.5, 0.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        torch.optim.NAdam,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        lambda p: torch.optim.ASGD(p, lr=0.1),
    ],
)
def test_optimizers_go_on_as_they_were(tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    manager = CheckpointManager(tmp_path)

    def stepped(model: Pieces, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        for parameter in model.parameters.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters.values()]

    model = Pieces(whole_pieces())
    optimizer = make(list(model.parameters.values()))
    stepped(model, optimizer)
    manager.save(model, optimizer, step=1)
    expected = stepped(model, optimizer)
    again = Pieces(whole_pieces(), seed=None)
    other = make(list(again.parameters.values()))
    manager.load(again, other)
    assert all(torch.equal(one, two) for one, two in zip(stepped(again, other), expected))


def test_state_that_no_other_plan_could_resume_is_refused(tmp_path: Path) -> None:
    model = Pieces(whole_pieces())
    optimizer = trained_once(model)
    optimizer.state[model.parameters["layers.0.weight"]]["row"] = torch.zeros(6)
    with pytest.raises(ValueError, match=r"a tensor of \[6\] as 'row' of 'layers.0.weight'"):
        CheckpointManager(tmp_path).save(model, optimizer, step=1)
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="not among this model's"):
        CheckpointManager(tmp_path).save(model, stranger, step=1)


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    assert manager.latest() is None and manager.steps() == ()
    for step in (1, 2, 30, 30, 4):
        manager.save(Pieces(whole_pieces()), step=step)
    # The latest by time is kept although its step is lower.
    assert manager.steps() == (4, 30)
    assert manager.latest() == tmp_path / "step-00000004"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "latest", "step-00000004", "step-00000030.1"]
    assert manager.load(Pieces(whole_pieces(), seed=None), step=30).step == 30
    with pytest.raises(ValueError, match="no checkpoint of step 7"):
        manager.load(Pieces(whole_pieces()), step=7)
    with pytest.raises(ValueError, match="keep at least one"):
        CheckpointManager(tmp_path, keep_last=0)


def damaged(folder: Path, how: str) -> None:
    data = next(folder.glob("*.safetensors"))
    if how == "no metadata":
        (folder / "metadata.json").unlink()
    elif how == "no manifest":
        (folder / "checkpoint.json").unlink()
    elif how == "short data":
        os.truncate(data, data.stat().st_size // 2)
    elif how == "short metadata":
        os.truncate(folder / "metadata.json", 10)
    elif how == "no data":
        data.unlink()
    elif how == "other format":
        manifest = json.loads((folder / "checkpoint.json").read_text())
        (folder / "checkpoint.json").write_text(json.dumps({**manifest, "format": "other"}))
    else:
        (folder / "checkpoint.json").write_text("{")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("no metadata", r"metadata\.json is missing"),
        ("no manifest", r"has no checkpoint\.json"),
        ("short data", r"safetensors has \d+ bytes, it was written with"),
        ("short metadata", r"metadata\.json has 10 bytes"),
        ("no data", "is missing"),
        ("other format", "of format other"),
        ("bad manifest", "is damaged"),
    ],
)
def test_damaged_checkpoints_are_refused(tmp_path: Path, how: str, reason: str) -> None:
    manager = CheckpointManager(tmp_path)
    damaged(manager.save(Pieces(whole_pieces()), step=1), how)
    model = Pieces(whole_pieces(), seed=3)
    with pytest.raises(ValueError, match=reason):
        manager.load(model)
    assert all(
        torch.equal(parameter, Pieces(whole_pieces(), seed=3).parameters[name])
        for name, parameter in model.parameters.items()
    )


def test_checkpoints_of_other_models_are_refused(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    model = Pieces(whole_pieces())
    manager.save(model, trained_once(model), step=1)
    renamed = Pieces(whole_pieces(), seed=3)
    renamed.state_names = ("other", "count")
    with pytest.raises(ValueError, match=r"another model: it has 'layers\.0\.bias'"):
        manager.load(renamed)
    training = Training("dp=1")
    with pytest.raises(ValueError, match="another model"):
        manager.load(training.parallel)
    with pytest.raises(ValueError, match="optimizer is AdamW, not SGD"):
        manager.load(model, torch.optim.SGD(model.parameters.values()))
    with pytest.raises(ValueError, match="1 parameter groups, the checkpoint's had 2"):
        manager.load(model, torch.optim.AdamW(model.parameters.values()))
    with pytest.raises(ValueError, match="no learning-rate schedule"):
        manager.load(model, scheduler=training.scheduler)


class Interrupted(Exception):
    """Stands for the end of the process."""


def test_a_save_that_ends_at_any_file_operation_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th operation that changes the directory fails, for every n."""
    done = 0
    for last in range(1, 100):
        directory = tmp_path / str(last)
        CheckpointManager(directory, keep_last=1).save(Pieces(whole_pieces(), seed=1), step=1)
        count = 0

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count == last:  # noqa: B023
                    raise Interrupted
                return function(*arguments, **options)

            return call

        finished = True
        with monkeypatch.context() as patch:
            for name in ("rename", "replace", "fsync"):
                patch.setattr(os, name, counted(getattr(os, name)))
            patch.setattr(folders.shutil, "rmtree", counted(folders.shutil.rmtree))
            try:
                CheckpointManager(directory, keep_last=1).save(Pieces(whole_pieces(), seed=2), step=2)
            except (Interrupted, ValueError):
                finished = False
        model = Pieces(whole_pieces(), seed=None)
        loaded = CheckpointManager(directory).load(model)
        assert model.holds(seed=loaded.step)
        done += 1
        if finished and count < last:
            break
    assert done > 8  # that many moments were tried


@pytest.mark.parametrize(("num_ranks", "rounds"), [(1, 4), (2, 2)])
def test_killed_while_saving(tmp_path: Path, num_ranks: int, rounds: int) -> None:
    """Processes that do nothing but save, one killed at random moments: the last good checkpoint loads each time."""
    command = [sys.executable, str(ROOT / "tests" / "checkpoint_killer.py"), str(tmp_path), str(num_ranks), str(rounds)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert f"loaded {rounds} times" in ran.stdout, ran.stderr[-3000:]


def test_a_model_without_a_plan_takes_no_optimizer_state(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    planned = Training("dp=1")
    manager.save(planned.parallel, planned.optimizer, step=0)
    parallel = planner.compile(seeded(Mlp), "dp=1", loss_fn=squared_error)
    with pytest.raises(ValueError, match="no plan yet"):
        manager.load(parallel, torch.optim.AdamW(parallel.parameters()))
    manager.load(parallel)


def test_an_asynchronous_save_stores_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, asynchronous=True)
    model, extra = Pieces(whole_pieces()), {"list": [1]}
    optimizer = trained_once(model)
    model.fill(seed=1)
    manager.save(model, optimizer, step=1, extra=extra)
    model.fill(seed=2)
    extra["list"].append(2)
    optimizer.param_groups[0]["lr"] = 7.0
    for state in optimizer.state.values():
        state["exp_avg"].fill_(7.0)
    loaded = manager.load(model, optimizer)
    assert model.holds(seed=1) and state_is_right(model, optimizer)
    assert loaded.extra == {"list": [1]} and optimizer.param_groups[0]["lr"] == 0.1


def test_a_program_is_checked_once_no_checkpoint_needs_the_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check takes the process groups away; a checkpoint that is written meanwhile failed on every rank."""
    is_writing, may_end, is_checking = (threading.Event() for _ in range(3))

    def save(*args: Any, **kwargs: Any) -> None:
        is_writing.set()
        assert may_end.wait(PATIENCE)

    def check() -> None:
        with virtual_mesh(MeshShape(("dp",), (2,))):
            is_checking.set()

    monkeypatch.setattr(folder_storage.dcp, "save", save)
    manager = CheckpointManager(tmp_path, asynchronous=True)
    manager.save(Pieces(whole_pieces()), step=1)
    assert is_writing.wait(PATIENCE)
    checker = threading.Thread(target=check)
    checker.start()
    checked_too_early = is_checking.wait(0.5)
    may_end.set()
    assert not checked_too_early and is_checking.wait(PATIENCE)
    checker.join(PATIENCE)


def test_what_goes_wrong_in_the_background_is_raised_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CheckpointManager(tmp_path, asynchronous=True)
    manager.save(Pieces(whole_pieces()), step=1, extra=1)
    manager.wait()

    def full(source: str, target: str) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(folders.os, "rename", full)
    manager.save(Pieces(whole_pieces()), step=2)
    with pytest.raises(ValueError, match=r"could not be written.*the disk is full"):
        manager.wait()
    assert manager.latest() == tmp_path / "step-00000001"


def test_pieces_that_leave_a_hole_are_refused_when_loaded(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(Pieces(two_dims(0)), step=1)
    with pytest.raises(ValueError, match=r"holds 5 of the 7 elements of 'layers\.0\.bias'|holds 5 of the 28"):
        manager.load(Pieces(two_dims(0)))
