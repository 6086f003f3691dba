"""The plans, optimizers and the small model of the tests of PyTorch's own tools on parallel modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.optimization import Adafactor

import planner
from passes.plan import Plan
from runtime.torch_compat.dtensors import are_subclasses_dispatched
from tests.small_models import seeded

#: Rows of weights over the tensor axis, so that data ranks cut what that has cut.
PINS = {"constraints": {"inner.weight": {"tp": "S(0)"}}, "forbid_replicated_matmul": True}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp": ("tp=2", PINS),
    "dp": ("dp=2", {"constraints": {"input:*": {"dp": "S(0)"}}}),
    "zero 1": ("dp=2", {"fix": {"zero": 1}}),
    "zero 3": ("dp=2", {"fix": {"zero": 3}}),
    "pp": ("pp=2", {}),
    "tp, zero 1": ("dp=2,tp=2", {"fix": {"zero": 1}, "constraints": {"inner.weight": {"tp": "S(0)"}}}),
    "zero 2, empty pieces": ("dp=4", {"fix": {"zero": 2}}),
    "zero 3, in pairs": ("dp=4", {"fix": {"zero": 3, "zero_ranks": 2}}),
    "pp, zero 1": ("pp=2,dp=2", {"fix": {"zero": 1}}),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "Adafactor, foreach": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2, foreach=True),
    "Muon": lambda parameters: torch.optim.Muon([one for one in parameters if one.dim() == 2], lr=1e-2),
}

if are_subclasses_dispatched():  # in torch 2.11 nothing plain goes beside a DTensor
    OPTIMIZERS["Adafactor of transformers"] = lambda parameters: Adafactor(
        parameters, lr=1e-2, scale_parameter=False, relative_step=False
    )
    OPTIMIZERS["Adafactor of transformers, its own rates"] = lambda parameters: Adafactor(
        parameters, scale_parameter=True, relative_step=True, beta1=0.9, weight_decay=0.01
    )


class Odd(nn.Module):
    """Sizes that four ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 3
        self.first = nn.Linear(6, 8)
        self.inner = nn.Linear(8, 8)
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.inner(torch.tanh(self.encode(x))))
        return {"loss": (self.last(hidden) - y).square().mean()}

    def get_extra_state(self) -> int:
        return self.version

    def set_extra_state(self, state: int) -> None:
        self.version = state

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


def odd_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(4, size, dtype=torch.float64, generator=generator) for name, size in (("x", 6), ("y", 5))}


_plans: dict[str, Plan] = {}


def compiled(plan: str) -> Any:
    """A parallel module of a plan, which is searched once."""
    target, options = (_plans[plan], {}) if plan in _plans else PLANS[plan]
    parallel = planner.compile(seeded(Odd), target, example_inputs=odd_batch(), **options)
    _plans[plan] = parallel.plan
    return parallel


_modules: dict[str, Any] = {}


def renewed(plan: str) -> Any:
    """The one module of a plan that cases share which change weights and gradients alone; both are as at first."""
    if plan not in _modules:
        _modules[plan] = compiled(plan)
    parallel = _modules[plan]
    parallel.load_full_state_dict(seeded(Odd).state_dict())
    parallel.zero_grad()
    return parallel


def difference(mine: dict[str, torch.Tensor], expected: dict[str, Any]) -> float:
    tensors = {name: tensor for name, tensor in expected.items() if isinstance(tensor, torch.Tensor)}
    errors = [(mine[name] - tensor).abs().max() / tensor.abs().max() for name, tensor in tensors.items()]
    return float(torch.stack(errors).max())


def warned_of_places(choose: Callable[[Any], list[dict[str, Any]]]) -> list[str]:
    """What a pipeline whose optimizer has chosen groups warns of in its second step."""
    parallel = compiled("pp")
    optimizer = torch.optim.SGD(choose(parallel))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            parallel.train_step(**odd_batch())
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in seen if "same places" in str(one.message)]


def by_place(parallel: Any) -> list[dict[str, Any]]:
    first, *others = parallel.parameters()
    return [{"params": [first], "lr": 0.1}, {"params": others, "lr": 0.01}]


def by_name(parallel: Any) -> list[dict[str, Any]]:
    head = [one for name, one in parallel.named_parameters() if name.startswith("last")]
    others = [one for name, one in parallel.named_parameters() if not name.startswith("last")]
    return [{"params": others, "lr": 0.1}, {"params": head, "lr": 0.01}]


def frozen_by_place(parallel: Any) -> list[dict[str, Any]]:
    for parameter in list(parallel.parameters())[:-1]:
        parameter.requires_grad_(False)
    return [{"params": list(parallel.parameters()), "lr": 0.1}]


def warnings_by_choice() -> dict[str, list[str]]:
    return {choose.__name__: warned_of_places(choose) for choose in (by_place, by_name, frozen_by_place)}
