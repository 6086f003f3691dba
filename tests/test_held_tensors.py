"""Tensors that a model, its loss or its code hold beside weights: a program follows what a script does to them."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import planner
from tests.held_tensors_worker import OTHERS, TARGETS, WRITES
from tests.ranks import run_on_ranks


@functools.cache
def results() -> dict[str, bool]:
    return run_on_ranks("held_tensors_worker", 2, list(TARGETS))


CASES = [
    "at first",
    "no program for what is written",
    "written once more",
    *(f"written: {name}" for name in WRITES),
    *(f"other: {name}" for name in OTHERS),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_one_device(case: str, target: str) -> None:
    assert results()[f"{case} {target}"]


class Scaled(nn.Module):
    """A frozen layer whose output is scaled by what is held beside it, and a layer that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.boundary, self.layer = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)
        self.scale, self.levels = torch.tensor(1.0), [torch.tensor(1.0)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.frozen(x)) * self.scale * AROUND * TABLE[0]
        y = self.boundary(y * 2 if self.levels[0].item() > 0.5 else y)
        return self.layer(y).square().mean()


AROUND, TABLE = 1.0, [torch.tensor(1.0)]


def test_cached_activations_are_those_of_what_is_held_now() -> None:
    """Also where it changed before the plan did."""
    global AROUND
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(4, 4)
    parallel = planner.compile(model, "pp=1,dp=1", example_inputs={"x": x})
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.0)
    parallel.get_submodule("frozen").requires_grad_(False).eval()
    cache = planner.ActivationCache(parallel, memory_bytes=1e6)

    def replan() -> None:
        cache.replan("pp=1,dp=1", optimizer, after="boundary")

    def twice() -> tuple[bool, int]:
        """Whether two steps have the loss of the model itself; how many samples they computed."""
        misses, losses = cache.misses, torch.stack([cache.train_step(x=x), cache.train_step(x=x)])
        return torch.allclose(losses, model(x).detach().expand(2), rtol=1e-5), cache.misses - misses

    replan()
    assert [twice(), twice()] == [(True, 4), (True, 0)]
    model.scale.fill_(0.5)
    assert twice() == (True, 4)
    model.levels[0].fill_(0.0)
    assert twice() == (True, 4)
    TABLE[0] = torch.tensor(2.0)
    assert twice() == (True, 4)
    AROUND = 3.0
    replan()
    assert twice() == (True, 4)
    model.scale = torch.tensor(0.25)
    replan()
    assert twice() == (True, 4)
    AROUND = 1.0
    assert twice() == (True, 4)


@dataclass
class Settings:
    tensor: torch.Tensor
    number: float
    array: np.ndarray


class Scale:
    """An object that is called."""

    def __init__(self) -> None:
        self.tensor, self.number = torch.tensor(1.0), 1.0

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        return y * self.tensor * self.number


class Holder(nn.Module):
    """Multiplies by all that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.array, self.number = np.ones(1, dtype=np.float32), np.float32(1.0)
        self.settings = Settings(torch.tensor(1.0), 1.0, np.ones(1, dtype=np.float32))
        self.ordered, self.queue = OrderedDict(a=torch.tensor(1.0)), deque([torch.tensor(1.0)])
        self.scale, self.inside = Scale(), SimpleNamespace(scale=Scale())
        self.bound = functools.partial(torch.mul, torch.tensor(1.0))
        self.layers = [nn.Linear(4, 4, bias=False).requires_grad_(False) for _ in range(2)]
        self.first, self.second = self.layers
        with torch.no_grad():
            self.second.weight.copy_(2 * self.first.weight)
        self.used, self.by_layer = [self.first], {self.first: torch.tensor(1.0)}
        self.pair, self.functions, self.numbers = (torch.tensor(1.0), 1.0), [lambda y: y], {1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * torch.from_numpy(self.array) * float(self.number)
        y = y * self.settings.tensor * self.settings.number * torch.from_numpy(self.settings.array)
        y = self.inside.scale(self.scale(y * self.ordered["a"] * self.queue[0]))
        y = self.used[0](y) * self.by_layer[self.first]
        y = self.functions[0](self.bound(y) * self.pair[0] * self.pair[1]) * sum(self.numbers)
        return (y * torch.as_tensor(ARRAY, dtype=torch.float32) * float(NUMBER)).square().mean()


ARRAY, NUMBER = np.ones(1), np.float32(1.0)


def set_globals(array: float, number: float) -> None:
    global ARRAY, NUMBER
    ARRAY, NUMBER = np.array([array]), np.float32(number)


TWO = torch.tensor(2.0)
#: What doubles the output.
DOUBLED: dict[str, Callable[[Holder], Any]] = {
    "an array is written to": lambda model: model.array.fill(2.0),
    "an array": lambda model: setattr(model, "array", np.array([2.0], dtype=np.float32)),
    "a number of numpy": lambda model: setattr(model, "number", np.float32(2.0)),
    "a tensor of settings": lambda model: setattr(model.settings, "tensor", TWO),
    "a number of settings": lambda model: setattr(model.settings, "number", 2.0),
    "an array of settings": lambda model: model.settings.array.fill(2.0),
    "settings": lambda model: setattr(model, "settings", Settings(TWO, 1.0, np.ones(1, dtype=np.float32))),
    "an ordered dict": lambda model: model.ordered.update(a=TWO),
    "a deque": lambda model: model.queue.appendleft(TWO),
    "a tensor of an object": lambda model: setattr(model.scale, "tensor", TWO),
    "a number of an object": lambda model: setattr(model.scale, "number", 2.0),
    "an object in another": lambda model: setattr(model.inside.scale, "number", 2.0),
    "a partial": lambda model: setattr(model, "bound", functools.partial(torch.mul, TWO)),
    "a layer in a list": lambda model: model.used.__setitem__(0, model.second),
    "what is kept by layer": lambda model: model.by_layer.update({model.first: TWO}),
    "a tuple": lambda model: setattr(model, "pair", (model.pair[0], 2.0)),
    "a function in a list": lambda model: model.functions.__setitem__(0, lambda y: y * 2),
    "a set": lambda model: (model.numbers.clear(), model.numbers.add(2.0)),
    "a global array": lambda model: set_globals(2.0, 1.0),
    "a global number of numpy": lambda model: set_globals(1.0, 2.0),
}


@pytest.mark.parametrize("name", DOUBLED)
def test_what_a_model_holds_is_followed(name: str) -> None:
    set_globals(1.0, 1.0)
    torch.manual_seed(0)
    model, x = Holder(), torch.randn(4, 4)
    parallel = planner.compile(model, "dp=1")
    before = parallel(x).detach()
    DOUBLED[name](model)
    with torch.no_grad():
        torch.testing.assert_close(parallel(x), model(x))
    torch.testing.assert_close(parallel(x).detach(), 4 * before)
