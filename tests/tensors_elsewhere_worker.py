"""One rank of a pipeline whose script touches buffers and parameters that another stage has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import planner
from tests.ranks import answer, result_of, task
from tests.small_models import seeded

X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("gain", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.gain).tanh()


class Model(nn.Module):
    """Buffers and a parameter at the root and below it, in both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = Block(), Block()
        self.register_buffer("first", torch.ones(6))
        self.register_buffer("last", torch.ones(6))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.late(self.early(x * self.first)) * self.last * self.scale).square().mean()


def full(value: float) -> torch.Tensor:
    return torch.full((6,), value, dtype=torch.float64)


def set_data(model: Any, value: float) -> None:
    for owner, name in ((model, "first"), (model, "last"), (model.early, "gain"), (model.late, "gain")):
        getattr(owner, name).data = full(value)


def set_buffers(model: Any, value: float) -> None:
    model.first, model.last = full(value), full(value)
    model.early.gain, model.late.gain = full(value), full(value)


def write_in_place(model: Any, value: float) -> None:
    for buffer in (model.first, model.last, model.early.gain, model.late.gain):
        buffer.mul_(0.0).add_(full(value))


def register_again(model: Any, value: float) -> None:
    for owner, name in ((model, "first"), (model, "last"), (model.early, "gain"), (model.late, "gain")):
        owner.register_buffer(name, full(value))


WRITES: tuple[Callable[[Any, float], None], ...] = (set_data, set_buffers, write_in_place, register_again, set_data)
READS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda buffer: float(buffer.sum()),
    lambda buffer: (buffer * X).sum(),
    lambda buffer: buffer.tolist(),
    lambda buffer: bool((buffer > 0).all()),
)


def at(model: Any, name: str) -> Any:
    path, _, last = name.rpartition(".")
    return getattr(model.get_submodule(path), last)


def failures() -> list[str]:
    model, wrong = seeded(Model), []
    parallel = planner.compile(seeded(Model), "pp=2", example_inputs=(X,))
    parallel.train_step(X)
    for number, write in enumerate(WRITES):
        write(parallel, 1.25 + number)
        write(model, 1.25 + number)
        if not torch.allclose(parallel.train_step(X), model(X).detach()):
            wrong.append(f"{write.__name__} {number}")
    said = f"not on this one: stage {2 if dist.get_rank() == 0 else 1} has it"
    for name in dict(model.named_buffers()).keys() - dict(parallel.named_buffers()).keys():
        texts = [str(result_of(lambda: read(at(parallel, name)))) for read in READS]  # noqa: B023
        wrong += [text for text in texts if said not in text or name not in text]
        if "cannot become" not in str(result_of(lambda: setattr(at(parallel, name), "data", torch.zeros(2)))):  # noqa: B023
            wrong.append(f"another shape of {name}")
    for name in dict(model.named_parameters()).keys() - dict(parallel.named_parameters()).keys():
        text = str(result_of(lambda: at(parallel, name)))  # noqa: B023
        wrong += [text] if said not in text or name not in text else []
    return wrong


if __name__ == "__main__":
    task()
    every_rank: list[Any] = [None, None]
    dist.all_gather_object(every_rank, result_of(failures))
    answer(every_rank)
