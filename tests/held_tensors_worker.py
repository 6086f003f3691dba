"""One rank of the tests of tensors that a model, its loss or its code hold beside weights, changed by a script."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import planner
from tests.ranks import answer, task

X = torch.linspace(-1.0, 1.0, 64, dtype=torch.float64).reshape(8, 8)
#: Read by the code of ``Layer``.
AROUND, TABLE = torch.tensor(1.0).double(), [torch.tensor(1.0).double()]


def tensor(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def matrix(seed: int) -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Layer(nn.Module):
    of_class = tensor(1.0)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()
        self.temperature = tensor(1.0)
        self.entries = [tensor(1.0), {"gain": tensor(1.0)}]
        self.mixing = matrix(1)
        self.levels = SimpleNamespace(level=tensor(1.0), count=[torch.tensor(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x) / self.temperature) * self.entries[0] * self.entries[1]["gain"]
        y = y + (x @ self.mixing) * self.of_class * AROUND * TABLE[0]
        for _ in range(int(self.levels.count[0])):
            y = y * 0.5
        return y * 3.0 if self.levels.level > 0.5 else y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Loss:
    """The distance to what a teacher says, weighted."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.weight = tensor(1.0)
        self.teacher = nn.Linear(8, 8).double().requires_grad_(False)

    def __call__(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return (outputs - self.teacher(batch["x"])).square().mean() * self.weight


class Pair:
    """A model and its parallel version, with one loss."""

    def __init__(self, target: str) -> None:
        self.model, self.loss_fn = Net(), Loss()
        example = {"x": X}
        self.parallel = planner.compile(self.model, target, example_inputs=example, loss_fn=self.loss_fn)

    def same(self) -> bool:
        """Whether both have one loss, one gradient of every parameter."""
        self.model.zero_grad()
        self.parallel.zero_grad()
        loss = self.loss_fn(self.model(X), {"x": X})
        loss.backward()
        actual, gradients = self.parallel.train_step(x=X), self.parallel.full_gradients()
        return torch.allclose(actual, loss.detach(), rtol=1e-9) and all(
            torch.allclose(gradients[name], parameter.grad, rtol=1e-9, atol=1e-14)
            for name, parameter in self.model.named_parameters()
        )

    @property
    def num_programs(self) -> int:
        return len(self.parallel._engine._maker._prepared)


def _rebind_around(pair: Pair) -> None:
    global AROUND
    AROUND = tensor(3.0)


def _follow_student(pair: Pair) -> None:
    teacher, student = pair.loss_fn.teacher, pair.model.layers[0].linear
    for own, other in zip(teacher.parameters(), student.parameters()):
        own.data = own.data * 0.9 + other.detach() * 0.1


def _follow_student_in_place(pair: Pair) -> None:
    teacher, student = pair.loss_fn.teacher, pair.model.layers[0].linear
    with torch.no_grad():
        for own, other in zip(teacher.parameters(), student.parameters()):
            own.lerp_(other, 0.5)


#: What a script writes into tensors.
WRITES: dict[str, Callable[[Pair], Any]] = {
    "an attribute": lambda pair: pair.model.layers[1].temperature.fill_(2.0),
    "by way of the parallel module": lambda pair: pair.parallel.layers[0].temperature.mul_(3.0),
    "by way of data": lambda pair: pair.model.layers[0].temperature.data.fill_(0.5),
    "an entry": lambda pair: pair.model.layers[1].entries[0].fill_(2.0),
    "an entry of an entry": lambda pair: pair.model.layers[1].entries[1]["gain"].fill_(2.0),
    "a matrix": lambda pair: pair.model.layers[0].mixing.copy_(matrix(2)),
    "a global": lambda pair: AROUND.fill_(2.0),
    "an entry of a global": lambda pair: TABLE[0].fill_(0.5),
    "of a class": lambda pair: Layer.of_class.fill_(0.25),
    "of a loss": lambda pair: pair.loss_fn.weight.fill_(4.0),
    "a teacher's weights": _follow_student_in_place,
    "a teacher's data": _follow_student,
}
#: What it puts in their place, or what is read in Python.
OTHERS: dict[str, Callable[[Pair], Any]] = {
    "an attribute": lambda pair: setattr(pair.model.layers[1], "temperature", tensor(3.0)),
    "of the parallel module": lambda pair: (
        setattr(pair.parallel.layers[1], "temperature", tensor(3.0))
        or setattr(pair.model.layers[1], "temperature", tensor(3.0))
    ),
    "an entry": lambda pair: pair.model.layers[0].entries.__setitem__(0, tensor(0.5)),
    "an entry of an entry": lambda pair: pair.model.layers[0].entries[1].update(gain=tensor(0.5)),
    "a matrix": lambda pair: setattr(pair.model.layers[1], "mixing", matrix(3)),
    "a global": _rebind_around,
    "an entry of a global": lambda pair: TABLE.__setitem__(0, tensor(2.0)),
    "of a class": lambda pair: setattr(Layer, "of_class", tensor(0.5)),
    "of a loss": lambda pair: setattr(pair.loss_fn, "weight", tensor(3.0)),
    "a teacher": lambda pair: setattr(pair.loss_fn, "teacher", nn.Linear(8, 8).double().requires_grad_(False)),
    "a number that decides": lambda pair: pair.model.layers[1].levels.level.fill_(0.0),
    "another number that decides": lambda pair: setattr(pair.model.layers[0].levels, "level", tensor(0.0)),
    "a number of rounds": lambda pair: pair.model.layers[0].levels.count[0].fill_(3),
    "another number of rounds": lambda pair: pair.model.layers[1].levels.count.__setitem__(0, torch.tensor(1)),
}
LATER = [WRITES[name] for name in ("an attribute", "an entry", "a global", "of a loss", "a teacher's data")]
TARGETS = ("tp=2", "pp=2")


def main() -> None:
    answers = {}
    for target in task():
        pair = Pair(target)
        answers[f"at first {target}"] = pair.same()
        before = pair.num_programs
        answers |= {f"written: {name} {target}": (change(pair), pair.same())[1] for name, change in WRITES.items()}
        answers[f"no program for what is written {target}"] = pair.num_programs == before
        answers |= {f"other: {name} {target}": (change(pair), pair.same())[1] for name, change in OTHERS.items()}
        # Into what has taken the others' places.
        answers[f"written once more {target}"] = all((change(pair), pair.same())[1] for change in LATER)
    answer(answers)


if __name__ == "__main__":
    main()
