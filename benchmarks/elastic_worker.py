"""A training that processes may leave and join at any moment: what each of them runs, and the same on one device."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from benchmarks.kill_points import Fate, KillPoint
from planner.elastic import Elastic
from runtime.elastic.job_rounds import MEMBER_VARIABLE

WIDTH, BATCH, LEARNING_RATE, DECAY = 48, 12, 1e-2, 0.99


@dataclass(frozen=True)
class Training:
    """Steps of AdamW in float64.

    Attributes:
        axes: what the model is compiled for, by the number of processes.
        fix: decisions of the step under any number of them.
        pause: seconds that a step lasts at least.
        dies: a process, by its number, that kills itself within a step.
        die_together: processes that kill themselves in the same step, once all of them have come to its end.
        checkpoint_every: steps from one checkpoint to the next; 0: no checkpoints.
        points: at which a process dies, one after the other, each when as many as at first take part. While fewer do,
            no step begins before the next process is ready.
        take_in: as of ``Elastic.steps``; the last step but one waits for those that come, unless ``"always"``.
        late: a process, by its number, that joins when those that are left have done a step without the lost one.
    """

    axes: Mapping[int, str]
    fix: Mapping[str, Any]
    num_steps: int
    every: int = 1
    pause: float = 0.0
    dies: tuple[int, int] | None = None
    late: int | None = None
    die_together: tuple[Sequence[int], int] = ((), 0)
    checkpoint_every: int = 0
    points: Sequence[KillPoint] = ()
    take_in: str = "always"


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3)]
    return nn.Sequential(*blocks).double()


def batch_of(number: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def loss_of(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return (outputs - 1).pow(2).mean()


def run_member(training: Training, folder: Path, member: Mapping[str, str], pause: float) -> None:
    """Train as the process that ``member`` says, and write to the training's log; begin after ``pause`` seconds."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    time.sleep(pause)  # as a process that imports everything
    os.environ.update(member)
    train_elastically(training, folder)


def train_elastically(training: Training, folder: Path) -> None:
    """Train as a process that a supervisor has started; each writes down the losses that it has seen, by step."""
    torch.set_num_threads(1)
    if int(os.environ[MEMBER_VARIABLE]) == training.late:
        while len({row[2] for row in rows_in(folder)}) < 2:
            time.sleep(0.05)
    job = Elastic()
    options = {"loss_fn": loss_of, "example_inputs": (batch_of(0),), "fix": dict(training.fix)}
    parallel = job.compile(model(), training.axes, **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
    schedule = StepLR(optimizer, step_size=1, gamma=DECAY)
    average = {}
    if parallel.has_work:
        average = {name: one.detach().clone() for name, one in parallel.named_parameters()}
    to_keep: dict[str, Any] = {"averages": average, "take_in": training.take_in}
    if training.checkpoint_every:
        to_keep |= {"checkpoints": folder / "checkpoints", "checkpoint_every": training.checkpoint_every}
    fate = Fate(training.points, max(training.axes), folder)
    if job.joins:
        (folder / f"ready-{os.environ[MEMBER_VARIABLE]}").touch()
    with (folder / f"losses-{os.getpid()}").open("w", buffering=1) as losses:
        for step in job.steps(
            optimizer,
            num_steps=training.num_steps,
            every=training.every,
            carried=schedule,
            **to_keep,
        ):
            with step:
                if training.points:
                    meet_fate(fate, job, folder)
                while training.take_in != "always" and step.number == training.num_steps - 2 and not job.others_wait:
                    time.sleep(0.01)
                loss = float(parallel.train_step(batch_of(step.number)))
                optimizer.step()
                if (int(os.environ[MEMBER_VARIABLE]), step.number) == training.dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step.number == training.die_together[1]:
                    die_together(training.die_together[0], folder)
                optimizer.zero_grad()
                schedule.step()
                with torch.no_grad():
                    for name, one in parallel.named_parameters() if average else ():
                        average[name].lerp_(one, 0.1)
                time.sleep(training.pause)
                copy = job.last_copy
                sizes = (0, 0) if copy is None else (copy.own_bytes, copy.second_bytes)
                losses.write(json.dumps([step.number, loss, torch.distributed.get_world_size(), *sizes]) + "\n")
    if parallel.has_work:
        weights = parallel.full_state_dict()
        averages = {name: one.full_tensor() for name, one in average.items()}  # type: ignore[attr-defined]
        torch.save([weights, averages], folder / f"weights-{torch.distributed.get_rank()}.pt")


def meet_fate(fate: Fate, job: Elastic, folder: Path) -> None:
    """Wait for those that are on their way if some were lost, and die if it is this process's turn."""
    num_ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    fate.begin_step(job.step, round_number=job.num_changes, rank=rank, num_ranks=num_ranks)
    while len(list(folder.glob("ready-*"))) < fate.num_killed:
        time.sleep(0.01)


def die_together(numbers: Sequence[int], folder: Path) -> None:
    """Kill this process if it is one of ``numbers``, once all of these have come here."""
    own = int(os.environ[MEMBER_VARIABLE])
    if own in numbers:
        (folder / f"dies-{own}").touch()
        while not all((folder / f"dies-{number}").exists() for number in numbers):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def rows_in(folder: Path) -> list[list[float]]:
    """What processes have written down: step, loss, how many took part, bytes of their own shard and of another's."""
    rows = []
    for path in folder.glob("losses-*"):
        for line in path.read_text().split("\n")[:-1]:
            rows.append(json.loads(line))
    return rows


def train_alone(training: Training) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The losses, the weights and their averages of plain PyTorch on one device."""
    alone = model()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=LEARNING_RATE)
    schedule = StepLR(optimizer, step_size=1, gamma=DECAY)
    average = {name: one.detach().clone() for name, one in alone.named_parameters()}
    losses = []
    for number in range(training.num_steps):
        loss = loss_of(alone(batch_of(number)), None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        with torch.no_grad():
            for name, one in alone.named_parameters():
                average[name].lerp_(one, 0.1)
        losses.append(float(loss.detach()))
    return losses, alone.state_dict(), average
