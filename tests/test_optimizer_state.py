"""State that a script reads and changes between steps: the next step goes on from it, as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import planner

pytestmark = pytest.mark.usefixtures("models_traced_once")

Change = Callable[[torch.optim.Optimizer], None]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()).square().mean()


def _in_place(optimizer: torch.optim.Optimizer) -> None:
    for entry in optimizer.state.values():
        entry["exp_avg"].mul_(0.5)


def _replaced(optimizer: torch.optim.Optimizer) -> None:
    for entry in optimizer.state.values():
        entry["exp_avg_sq"] = entry["exp_avg_sq"] * 4


def _forgotten(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def _of_one_forgotten(optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[optimizer.param_groups[0]["params"][1]]


def _loaded(optimizer: torch.optim.Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    _in_place(optimizer)
    optimizer.load_state_dict(state)


CHANGES = (_in_place, _replaced, _forgotten, _of_one_forgotten, _loaded)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, lambda parameters: torch.optim.Adam(parameters, amsgrad=True)], ids=["adamw", "amsgrad"]
)
def test_a_step_goes_on_from_state_that_was_changed(make: Callable[..., torch.optim.Optimizer], change: Change) -> None:
    torch.manual_seed(0)
    model, batches = Layers().double(), torch.randn(5, 6, 4, dtype=torch.float64)
    parallel = planner.compile(copy.deepcopy(model), example_inputs={"x": batches[0]})
    parallel.load_full_state_dict(model.state_dict())
    optimizers = make(model.parameters()), make(parallel.parameters())
    for nr, batch in enumerate(batches):
        model(batch).backward()
        parallel(batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            if nr in (1, 3):
                change(optimizer)
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(parallel.full_state_dict()[name], expected, rtol=1e-12, atol=1e-15)


def test_state_that_no_step_has_replaced_is_shown_by_the_same_tensors() -> None:
    parallel = planner.compile(Layers(), example_inputs={"x": torch.randn(6, 4)})
    parallel.initialise(seed=0)
    optimizer = torch.optim.AdamW(parallel.parameters())
    shown = []
    for _ in range(3):
        parallel(torch.randn(6, 4)).backward()
        optimizer.step()
        shown.append([value for entry in optimizer.state.values() for value in entry.values()])
    assert all(one is other for one, other in zip(shown[0], shown[2], strict=True))
    copied = next(iter(copy.deepcopy(dict(optimizer.state)).values()))["exp_avg"]
    assert copied.lent is None
