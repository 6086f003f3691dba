"""Hand-made owners of pieces, and small models to train, for tests of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

import planner
from runtime.module.parallel_module import ParallelModule
from runtime.state.owned import Owned
from tests.small_models import Mlp, seeded, squared_error

#: Offsets and sizes of what a rank holds.
Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
SHAPES = {"layers.0.weight": (7, 4), "layers.0.bias": (7,), "layers.1.weight": (3, 4, 5), "scale": ()}


def value_of(name: str, shape: Sequence[int], *, seed: int = 0) -> torch.Tensor:
    """The whole tensor: the same on every rank."""
    generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
    return torch.randn(tuple(shape), generator=generator)


def part_of(whole: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
    return whole[tuple(slice(at, at + size) for at, size in zip(*rectangle))].clone()


class Pieces:
    """A model of which this rank holds the given rectangles (name, rectangle, primary); a buffer beside."""

    def __init__(self, held: dict[str, tuple[Rectangle, bool]], *, seed: int | None = 0) -> None:
        self.state_names = (*SHAPES, "count")
        self.changes = 0
        self.held = held
        self.parameters = {}
        for name, (rectangle, _) in held.items():
            local = part_of(value_of(name, SHAPES[name], seed=seed or 0), rectangle)
            self.parameters[name] = nn.Parameter(local if seed is not None else torch.zeros_like(local))
        self.buffer = torch.tensor(0 if seed is None else 5)

    def owned(self) -> tuple[Owned, ...]:
        parameters = [
            Owned(name, (), self.parameters[name], SHAPES[name], offsets, "parameter", True, True, primary)
            for name, ((offsets, _), primary) in self.held.items()
        ]
        first = all(not any(offsets) and primary for (offsets, _), primary in self.held.values())
        return (*parameters, Owned("count", (), self.buffer, (), (), "buffer", False, True, first))

    def weights_changed(self) -> None:
        self.changes += 1

    def fill(self, *, seed: int) -> None:
        """Give the parameters the seed's values."""
        for name, (rectangle, _) in self.held.items():
            self.parameters[name].data.copy_(part_of(value_of(name, SHAPES[name], seed=seed), rectangle))

    def holds(self, *, seed: int = 0) -> bool:
        """Whether every piece is the part of the seed's tensors that it should be."""
        right = [
            torch.equal(self.parameters[name].detach(), part_of(value_of(name, SHAPES[name], seed=seed), rectangle))
            for name, (rectangle, _) in self.held.items()
        ]
        return all(right) and int(self.buffer) == 5


def whole_pieces() -> dict[str, tuple[Rectangle, bool]]:
    return {name: (((0,) * len(shape), shape), True) for name, shape in SHAPES.items()}


def uneven_chunks(rank: int, num_ranks: int) -> dict[str, tuple[Rectangle, bool]]:
    """As ZeRO cuts: chunks of the first dim, the last ones smaller or empty; scalars on every rank."""
    held = {}
    for name, shape in SHAPES.items():
        if not shape:
            held[name] = (((), ()), rank == 0)
            continue
        length = math.ceil(shape[0] / num_ranks)
        begin = min(rank * length, shape[0])
        size = min(length, shape[0] - begin)
        held[name] = (((begin, *(0 for _ in shape[1:])), (size, *shape[1:])), True)
    return held


def two_dims(rank: int) -> dict[str, tuple[Rectangle, bool]]:
    """Four ranks: the first dim in two uneven parts, the second in two; vectors are held twice; one stage's layer."""
    row, column = divmod(rank, 2)
    held: dict[str, tuple[Rectangle, bool]] = {}
    for name, shape in SHAPES.items():
        if name.startswith("layers.1") and rank == 3:
            held[name] = (((0,) * len(shape), shape), True)
        elif len(shape) == 2:
            rows, columns = ((0, 5), (5, 2))[row], ((0, 1), (1, 3))[column]
            held[name] = (((rows[0], columns[0]), (rows[1], columns[1])), True)
        elif len(shape) == 1:
            begin, size = ((0, 5), (5, 2))[row]
            held[name] = (((begin,), (size,)), column == 0)
        elif not shape:
            held[name] = (((), ()), rank == 0)
    return held


def trained_once(model: Pieces, *, learning_rate: float = 0.1) -> torch.optim.Optimizer:
    """AdamW in two groups, after a step with gradients that all ranks know."""
    decayed = [parameter for name, parameter in model.parameters.items() if "weight" in name]
    rest = [parameter for name, parameter in model.parameters.items() if "weight" not in name]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}], lr=learning_rate
    )
    for name, (rectangle, _) in model.held.items():
        model.parameters[name].grad = part_of(value_of(name, SHAPES[name], seed=17), rectangle)
    optimizer.step()
    return optimizer


def state_is_right(model: Pieces, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's state is the part of one process's that it should be."""
    whole = Pieces(whole_pieces())
    expected = trained_once(whole).state
    return all(
        torch.equal(states["exp_avg"], part_of(expected[whole.parameters[name]]["exp_avg"], rectangle))
        and torch.equal(states["exp_avg_sq"], part_of(expected[whole.parameters[name]]["exp_avg_sq"], rectangle))
        and float(states["step"]) == 1.0
        for name, (rectangle, _) in model.held.items()
        for states in [optimizer.state[model.parameters[name]]]
    )


class Dropped(Mlp):
    """The MLP with dropout before its last layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.3, training=self.training))


def compiled(mesh: str, *, dtype: torch.dtype = torch.float64, dropout: bool = False) -> ParallelModule:
    """An MLP on a mesh, planned at the first call."""
    model = seeded(Dropped if dropout else Mlp).to(dtype)
    return planner.compile(
        model,
        mesh,
        loss_fn=squared_error,
        forbid_replicated_matmul=not dropout,
        example_inputs=mlp_data(0, dtype),
    )


def mlp_data(step: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(8, 16, generator=generator, dtype=torch.float64)
    target = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    return x.to(dtype), target.to(dtype)


def two_groups(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """All but norms with weight decay, norms without."""
    named = list(named_parameters)
    return [
        {"params": [parameter for name, parameter in named if "norm" not in name], "weight_decay": 0.1},
        {"params": [parameter for name, parameter in named if "norm" in name], "weight_decay": 0.0},
    ]


class StockTraining:
    """The model of ``Training`` in plain torch, on one device."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.model = seeded(Mlp).double()
        self.optimizer = make(two_groups(self.model.named_parameters()))

    def step(self, number: int) -> float:
        x, target = mlp_data(number)
        loss = nn.functional.mse_loss(self.model(x), target)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class Training:
    """A model, AdamW in two groups, a schedule."""

    def __init__(self, mesh: str, *, dtype: torch.dtype = torch.float64, dropout: bool = False) -> None:
        self.parallel = compiled(mesh, dtype=dtype, dropout=dropout)
        self.dtype = dtype
        self.optimizer = torch.optim.AdamW(two_groups(self.parallel.named_parameters()), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.7)

    def losses(self, steps: range) -> list[float]:
        states = []
        for step in steps:
            loss = self.parallel.train_step(*mlp_data(step, self.dtype))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            states.append(float(loss))
        return states
